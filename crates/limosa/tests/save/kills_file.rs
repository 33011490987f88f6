//! limosa, its watchdog or both are killed at random moments of a save by file.

use crate::kills::Victim;
use crate::needs_qemu;

const VIA: &[&str] = &["--via", "file"];

#[test]
fn a_killed_limosa_leaves_a_running_vm_and_no_file_or_a_whole_one() {
    needs_qemu!();
    let outcomes = Victim::new(VIA).survives_kills_of_limosa(20, 12);
    assert!(outcomes.files + outcomes.none >= 30 && outcomes.none >= 5, "{outcomes:?}");
}

#[test]
fn an_interrupt_at_the_beginning_leaves_a_vm_that_can_be_saved() {
    needs_qemu!();
    let outcomes = Victim::new(VIA).survives_interrupts_at_the_beginning(10);
    assert!(outcomes.none >= 5, "{outcomes:?}");
}

#[test]
fn a_save_completes_without_its_watchdog() {
    needs_qemu!();
    Victim::new(VIA).survives_the_death_of_the_watchdog();
}

#[test]
fn when_limosa_and_its_watchdog_die_resume_repairs_what_they_left() {
    needs_qemu!();
    Victim::new(VIA).is_repaired_when_both_die();
}

#[test]
fn a_vm_that_is_to_be_stopped_is_never_lost() {
    needs_qemu!();
    let outcomes = Victim::new(VIA).survives_kills_with_stop();
    assert!(outcomes.none >= 3, "{outcomes:?}");
}
