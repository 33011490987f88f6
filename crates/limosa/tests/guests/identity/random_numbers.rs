//! The random numbers of clones: vmgenid.

use limosa_testkit::{Machine, Qmp, Serial, Series, series_skipped};

use super::*;
use crate::needs_qemu;

/// Linux's line in its log (`drivers/char/random.c`).
const RESEEDED: &str = "dmesg | grep -c 'crng reseeded due to virtual machine fork' || true";

fn device(option: &'static str) -> impl Fn(&str) -> Vec<String> {
    move |_| ["-device", option].map(str::to_owned).into()
}

fn reseeds(guest: &Serial) -> u32 {
    guest.shell(RESEEDED).unwrap()[0].parse().unwrap()
}

fn guid(clone: &Value) -> String {
    let mut qmp = Qmp::connect(Path::new(clone["monitor"].as_str().unwrap()), SOON).unwrap();
    qmp.execute("query-vm-generation-id", json!({})).unwrap()["guid"].as_str().unwrap().to_owned()
}

/// Waits until a guest has reseeded: it does when it has handled the interrupt.
fn wait_reseeded(guest: &Serial) {
    wait_for("the guest to reseed", || (reseeds(guest) == 1).then_some(()));
}

/// Clones, and a lazily restored VM, reseed in this series of QEMU.
fn reseeds_in(series: Series) {
    needs_qemu!();
    if series != Series::Installed && series_skipped() {
        return;
    }
    let guest = LinuxGuest { vmgenid: true, ..LinuxGuest::default() };
    let scene = LinuxScene::in_series(series, &guest, &device("vmgenid,guid=auto"), |source| {
        assert_eq!(reseeds(source.serial()), 0);
    });
    // 7.2 maps no snapshot: each clone has a copy.
    let (memory, mapped) = if series == Series::Oldest { ("eager", json!([])) } else { ("mapped", json!(["mem"])) };
    let clones = scene.start_by(memory, 2, &[], &[]);
    for clone in &clones {
        assert_eq!(clone["mapped_blocks"], mapped);
        wait_reseeded(&console(clone));
    }
    assert_ne!(guid(&clones[0]), guid(&clones[1]));
    // Lazily, the generation is written to a page that has not come yet.
    let machine = Machine::linux(guest).series(series);
    let vm = device("vmgenid,guid=auto")("");
    let vm = vm.iter().fold(machine, |machine, word| machine.argument(word)).start_incoming().unwrap();
    let (snapshot, socket) = (scene.snapshot.to_str().unwrap(), vm.qmp_socket());
    let words = ["restore", snapshot, "--qmp", socket.to_str().unwrap(), "--memory", "lazy", "--json"];
    assert_eq!(limosa(words).json()["mode"], "lazy");
    wait_reseeded(vm.serial());
}

#[test]
fn each_clone_reseeds_its_random_numbers_if_its_vmgenid_is_made_for_it() {
    reseeds_in(Series::Installed);
}

#[test]
fn each_clone_reseeds_its_random_numbers_in_the_oldest_series() {
    reseeds_in(Series::Oldest);
}

#[test]
fn each_clone_reseeds_its_random_numbers_in_the_newest_series() {
    reseeds_in(Series::Newest);
}

#[test]
fn clones_with_the_guid_of_the_saved_vm_do_not_reseed() {
    needs_qemu!();
    let guest = LinuxGuest { vmgenid: true, ..LinuxGuest::default() };
    let fixed = device("vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87");
    let scene = LinuxScene::new(&guest, &fixed, |_| {});
    let [clone] = scene.start(1, &[], &[]).try_into().unwrap();
    assert_eq!(guid(&clone), "324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87");
    let console = console(&clone);
    // Time in which the others have reseeded.
    console.shell("sleep 3").unwrap();
    assert_eq!(reseeds(&console), 0);
}
