//! The typed monitor, the job record and `resume` against stock QEMU.

use crate::stock;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use crate::stock::{MEMORY, Stock, eventually, run_state};
use limosa_qemu::monitor::{MigrationStatus, Monitor, RunState, Settings};
use limosa_qemu::qmp::{Options, Qmp, QmpError, Version};
use limosa_qemu::takeover::Outcome;
use limosa_qemu::{JobKind, JobPhase, JobRecord, JobRecordError, ResumeError, ResumeOptions, resume};
use serde_json::{Value, json};
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(60);

fn record(monitor: &Monitor) -> JobRecord {
    JobRecord::new(
        JobKind::Save,
        Uuid::from_u128(1),
        Path::new("/snapshot"),
        run_state(monitor) == RunState::Running,
        Settings::new(),
    )
}

/// Makes a record look as if its process had died.
fn unfinished(mut record: JobRecord) -> JobRecord {
    record.process.started += 1;
    record
}

#[test]
fn the_greeting_gives_the_version_and_the_peer_is_the_qemu_process() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&["-S"]);
    let monitor = stock.monitor();
    assert!(monitor.version() >= Version::new(7, 0, 0), "{}", monitor.version());
    assert_eq!(monitor.qmp().process(), Some(stock.child.id()));
    assert!(monitor.qmp().passes_descriptors());
}

#[test]
fn a_multifd_migration_that_breaks_is_held_until_its_settings_may_change() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&[]);
    let monitor = stock.monitor();
    eventually("the VM runs", || run_state(&monitor) == RunState::Running);
    assert!(!monitor.holds_migration().unwrap());
    let wish = Settings::new().capability("multifd", true).parameter("multifd-channels", 4);
    let wish = wish.parameter("max-bandwidth", 65536);
    let undo = monitor.settings().unwrap().change_to(&wish).undo;
    for _ in 0..4 {
        let place = stock.path("migration");
        let listener = UnixListener::bind(&place).unwrap();
        monitor.apply_settings(&wish).unwrap();
        monitor.migrate(&format!("unix:{}", place.display()), false).unwrap();
        let channels: Vec<_> = (0..5).map(|_| listener.accept().unwrap()).collect();
        // A connection that breaks earlier, while QEMU's migration thread waits for its channels for the first time, can
        // leave that thread waiting for ever (`multifd_send_sync_main` of QEMU 10.0, called by its setup).
        eventually("the migration is active", || monitor.migration().unwrap().status == MigrationStatus::Active);
        assert!(monitor.holds_migration().unwrap());
        assert!(!monitor.wait_migration_released(Duration::from_millis(20)).unwrap());
        drop((channels, listener));
        std::fs::remove_file(&place).unwrap();
        eventually("the migration has failed", || monitor.migration().unwrap().status.is_over());
        assert!(monitor.wait_migration_released(PATIENCE).unwrap());
        monitor.restore_settings(&undo).unwrap();
        assert_eq!(run_state(&monitor), RunState::Running);
    }
}

#[test]
fn a_second_client_is_told_that_the_monitor_is_held() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&["-S"]);
    let first = stock.monitor();
    let impatient = Options { greeting_timeout: Duration::from_millis(300), ..Options::default() };
    assert!(matches!(Qmp::connect(&stock.address(), &impatient).unwrap_err(), QmpError::Busy { .. }));
    drop(first);
    assert_eq!(run_state(&stock.monitor()), RunState::Prelaunch);
}

#[test]
fn a_pretty_printing_tcp_monitor_is_understood_and_passes_no_descriptors() {
    if stock::skipped() {
        return;
    }
    let chardev = "socket,id=second,host=127.0.0.1,port=0,server=on,wait=off";
    let stock = Stock::start(&["-S", "-chardev", chardev, "-mon", "chardev=second,mode=control,pretty=on"]);
    // The first monitor answers when QEMU has made all of them, and knows at which port.
    let devices = stock.monitor().qmp().execute("query-chardev", Value::Null).unwrap();
    let second = devices.as_array().unwrap().iter().find(|device| device["label"] == "second").unwrap();
    let place = second["filename"].as_str().unwrap().trim_start_matches("disconnected:").split(',').next().unwrap();
    let address = place.parse().unwrap();
    let monitor = Monitor::new(Qmp::connect(&address, &Options::default()).unwrap());
    assert_eq!(run_state(&monitor), RunState::Prelaunch);
    let error = monitor.getfd("x", File::open("/dev/null").unwrap().as_fd()).unwrap_err();
    assert!(matches!(error, QmpError::NoDescriptors { .. }), "{error}");
    drop(stock);
    assert!(monitor.status().unwrap_err().is_gone());
}

#[test]
fn the_vm_is_described_as_it_was_started() {
    if stock::skipped() {
        return;
    }
    let uuid = "12345678-1234-1234-1234-123456789abc";
    let stock = Stock::start(&["-S", "-name", "a name", "-uuid", uuid, "-device", "virtio-balloon-pci,id=b"]);
    let monitor = stock.monitor();
    assert_eq!(monitor.vm_name().unwrap().as_deref(), Some("a name"));
    assert_eq!(monitor.uuid().unwrap(), Some(uuid.parse().unwrap()));
    assert!(monitor.machine().unwrap().starts_with("pc-i440fx-"), "aliases are resolved");
    let blocks = monitor.ram_blocks().unwrap();
    let main = blocks.iter().find(|block| block.name == "mem").unwrap();
    assert_eq!((main.page_size, main.used_length, main.total_length), (4096, MEMORY, MEMORY));
    let backends = monitor.memory_backends().unwrap();
    let backend = backends.iter().find(|backend| backend.id == "mem").unwrap();
    assert_eq!((backend.kind.as_str(), backend.size, backend.share), ("memory-backend-file", MEMORY, true));
    let devices = monitor.devices().unwrap();
    assert!(devices.iter().any(|device| device.id == "b" && device.kind == "virtio-balloon-pci"), "{devices:?}");
    assert!(!devices.iter().any(|device| device.is_assigned() || device.is_external_disk()));
    assert_eq!(monitor.migration().unwrap().blocked_reasons, Vec::<String>::new());
}

#[test]
fn a_vm_without_uuid_and_name_says_none() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&["-S"]);
    let monitor = stock.monitor();
    assert_eq!((monitor.uuid().unwrap(), monitor.vm_name().unwrap()), (None, None));
}

#[test]
fn what_blocks_a_migration_is_passed_on_in_qemus_words() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::prepared(&["-S", "-drive", "if=virtio,format=raw,file=fat:rw:shared"], |directory| {
        std::fs::create_dir(directory.join("shared")).unwrap();
    });
    let reasons = stock.monitor().migration().unwrap().blocked_reasons;
    assert!(reasons.iter().any(|reason| reason.contains("vvfat")), "{reasons:?}");
}

#[test]
fn writable_disks_are_listed_with_their_files_and_read_only_ones_are_not() {
    if stock::skipped() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = |name: &str| {
        let path = directory.path().join(name);
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        path.display().to_string()
    };
    let (drive, node, locked, flash) = (image("drive"), image("node"), image("locked"), image("flash"));
    let stock = Stock::start(&[
        "-S",
        "-drive",
        &format!("id=d0,if=virtio,format=raw,file={drive}"),
        "-blockdev",
        &format!("driver=raw,node-name=n0,file.driver=file,file.filename={node}"),
        "-device",
        "virtio-blk-pci,id=v0,drive=n0",
        "-blockdev",
        &format!("driver=raw,node-name=n1,read-only=on,file.driver=file,file.filename={locked}"),
        "-device",
        "virtio-blk-pci,id=v1,drive=n1",
        "-drive",
        &format!("if=pflash,format=raw,file={flash}"),
        "-blockdev",
        "driver=null-co,node-name=n2,size=1048576,read-zeroes=on",
        "-device",
        "virtio-blk-pci,drive=n2",
    ]);
    let disks = stock.monitor().disks().unwrap();
    let paths: Vec<String> =
        disks.iter().filter_map(|disk| disk.path.as_ref().map(|path| path.display().to_string())).collect();
    assert_eq!(paths.len(), 3, "{disks:?}");
    for path in [&drive, &node, &flash] {
        assert!(paths.contains(path), "{path} in {disks:?}");
    }
    let found = disks.iter().find(|disk| disk.node == "n0").unwrap();
    assert_eq!((found.format.as_str(), found.virtual_size), ("raw", 1 << 20));
    assert!(found.device.contains("v0"), "{}", found.device);
    let file = found.file().unwrap().unwrap();
    assert_eq!(file.size, 1 << 20);
    assert!(file.modified.0 > 0);
    let null = disks.iter().find(|disk| disk.node == "n2").unwrap();
    assert_eq!((null.path.as_ref(), null.file().unwrap()), (None, None));
}

#[test]
fn a_relative_disk_is_found_where_qemu_runs() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::prepared(&["-S", "-drive", "if=virtio,format=raw,file=image"], |directory| {
        File::create(directory.join("image")).unwrap().set_len(1 << 20).unwrap();
    });
    let disks = stock.monitor().disks().unwrap();
    assert_eq!(disks[0].filename, "image");
    assert_eq!(disks[0].path, Some(stock.path("image")));
    assert_eq!(disks[0].file().unwrap().unwrap().size, 1 << 20);
}

#[test]
fn settings_are_put_back_to_exactly_what_they_were() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&["-S"]);
    let monitor = stock.monitor();
    monitor.apply_settings(&Settings::new().parameter("max-bandwidth", 12_345_678).capability("events", true)).unwrap();
    let before = monitor.settings().unwrap();
    let wish = Settings::new()
        .capability("events", true)
        .capability("return-path", true)
        .capability("no-such-thing", true)
        .parameter("max-bandwidth", 0)
        .parameter("downtime-limit", 77);
    let change = monitor.plan_settings(&wish).unwrap();
    assert_eq!(monitor.settings().unwrap(), before, "planning changes nothing");
    assert_eq!(change.unknown, ["no-such-thing"]);
    assert!(!change.set.capabilities.contains_key("events"), "it is so already");
    monitor.apply_settings(&change.set).unwrap();
    assert_ne!(monitor.settings().unwrap(), before);
    monitor.restore_settings(&change.undo).unwrap();
    assert_eq!(monitor.settings().unwrap(), before);
    let excluded = Settings::new().capability("mapped-ram", true).capability("postcopy-ram", true);
    assert!(monitor.apply_settings(&excluded).unwrap_err().is_refusal());
    assert_eq!(monitor.settings().unwrap(), before, "QEMU takes a list as a whole or not at all");
}

#[test]
fn descriptors_reach_qemu_and_can_be_taken_away() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&["-S"]);
    let monitor = stock.monitor();
    let null = File::open("/dev/null").unwrap();
    let first = monitor.add_fd(null.as_fd(), None, "one").unwrap();
    let second = monitor.add_fd(null.as_fd(), Some(first.id), "two").unwrap();
    assert_eq!(first.id, second.id);
    assert_ne!(first.descriptor, second.descriptor);
    let sets = monitor.descriptor_sets().unwrap();
    assert_eq!(sets.len(), 1);
    assert!(sets[0].1.contains(&"one".to_owned()) && sets[0].1.contains(&"two".to_owned()));
    monitor.remove_fd(first.id).unwrap();
    monitor.remove_fd(first.id).unwrap();
    assert_eq!(monitor.descriptor_sets().unwrap(), []);
    monitor.getfd("name", null.as_fd()).unwrap();
    monitor.closefd("name").unwrap();
    monitor.closefd("name").unwrap();
}

#[test]
fn a_save_through_a_socket_pair_leaves_no_trace_of_the_record_in_the_stream() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&[]);
    let monitor = stock.monitor();
    let job = record(&monitor);
    job.create(&monitor).unwrap();
    monitor
        .apply_settings(
            &Settings::new().capability("events", true).capability("return-path", true).parameter("max-bandwidth", 0),
        )
        .unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    monitor.getfd("limosa", theirs.as_fd()).unwrap();
    drop(theirs);
    let mut receiver = ours.try_clone().unwrap();
    let stream = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        receiver.read_to_end(&mut bytes).unwrap();
        bytes
    });
    monitor.migrate("fd:limosa", false).unwrap();
    eventually("device", || monitor.migration().unwrap().status == MigrationStatus::Device);
    // SHUT 0: the receiver has everything.
    ours.write_all(&[0, 1, 0, 4, 0, 0, 0, 0]).unwrap();
    eventually("completed", || monitor.migration().unwrap().status == MigrationStatus::Completed);
    assert_eq!(run_state(&monitor), RunState::Postmigrate);
    monitor.cont().unwrap();
    let stop = monitor.qmp().wait_event(&["STOP"], PATIENCE).unwrap().unwrap();
    let resume = monitor.qmp().wait_event(&["RESUME"], PATIENCE).unwrap().unwrap();
    assert!(resume.since(&stop).is_some() && stop.sequence < resume.sequence);
    let stream = stream.join().unwrap();
    assert!(stream.len() as u64 > MEMORY / 2, "the stream is whole");
    let contains = |needle: &[u8]| stream.windows(needle.len()).any(|window| window == needle);
    assert!(contains(b"globalstate") && !contains(b"limosa-job") && !contains(b"secret"));
    assert_eq!(JobRecord::read(&monitor).unwrap(), Some(job));
}

#[test]
fn a_stored_vm_loads_where_only_one_side_has_a_record() {
    if stock::skipped() {
        return;
    }
    let source = Stock::start(&[]);
    let monitor = source.monitor();
    let file = source.path("stored");
    let mapped =
        Settings::new().capability("mapped-ram", true).capability("multifd", true).parameter("max-bandwidth", 0);
    record(&monitor).create(&monitor).unwrap();
    monitor.apply_settings(&mapped).unwrap();
    // QEMU looks for a descriptor whose access mode is exactly that of its open: write-only to save.
    let both = File::options().read(true).write(true).create(true).truncate(true).open(&file).unwrap();
    let set = monitor.add_fd(both.as_fd(), None, "").unwrap();
    assert!(monitor.migrate(&format!("file:{}", set.path()), false).unwrap_err().is_refusal());
    monitor.remove_fd(set.id).unwrap();
    let set = monitor.add_fd(File::options().write(true).open(&file).unwrap().as_fd(), None, "").unwrap();
    monitor.migrate(&format!("file:{}", set.path()), false).unwrap();
    eventually("completed", || monitor.migration().unwrap().status == MigrationStatus::Completed);

    for has_record in [false, true] {
        let destination = Stock::start(&["-incoming", "defer"]);
        let monitor = destination.monitor();
        if has_record {
            record(&monitor).create(&monitor).unwrap();
        }
        monitor.apply_settings(&mapped).unwrap();
        // And read-only to load.
        let set = monitor.add_fd(File::open(&file).unwrap().as_fd(), None, "").unwrap();
        monitor.migrate_incoming(&format!("file:{}", set.path())).unwrap();
        eventually("loaded", || monitor.migration().unwrap().status == MigrationStatus::Completed);
        assert_eq!(run_state(&monitor), RunState::Running);
        assert_eq!(JobRecord::read(&monitor).unwrap().is_some(), has_record);
    }
}

#[test]
fn a_failed_load_keeps_the_monitor_and_tells_why_but_cannot_be_repeated() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&["-incoming", "defer"]);
    let monitor = stock.monitor();
    let file = stock.path("nonsense");
    std::fs::write(&file, [b'x'; 4096]).unwrap();
    let uri = format!("file:{}", file.display());
    monitor.migrate_incoming(&uri).unwrap();
    eventually("failed", || monitor.migration().unwrap().status == MigrationStatus::Failed);
    assert!(monitor.migration().unwrap().error.is_some());
    assert!(monitor.migrate_incoming(&uri).unwrap_err().is_refusal());
}

#[test]
fn a_stop_before_the_load_makes_the_vm_arrive_stopped_and_cont_undoes_it() {
    if stock::skipped() {
        return;
    }
    let source = Stock::start(&[]);
    let monitor = source.monitor();
    let file = source.path("stored");
    let uri = format!("file:{}", file.display());
    monitor.apply_settings(&Settings::new().parameter("max-bandwidth", 0)).unwrap();
    monitor.migrate(&uri, false).unwrap();
    eventually("completed", || monitor.migration().unwrap().status == MigrationStatus::Completed);
    for undone in [false, true] {
        let destination = Stock::start(&["-incoming", "defer"]);
        let monitor = destination.monitor();
        monitor.stop().unwrap();
        if undone {
            monitor.cont().unwrap();
        }
        assert_eq!(run_state(&monitor), RunState::Inmigrate);
        monitor.migrate_incoming(&uri).unwrap();
        eventually("loaded", || monitor.migration().unwrap().status == MigrationStatus::Completed);
        assert_eq!(run_state(&monitor), if undone { RunState::Running } else { RunState::Paused });
    }
}

#[test]
fn a_record_is_a_lock_and_says_whose_it_is() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&["-S"]);
    let monitor = stock.monitor();
    assert_eq!(JobRecord::read(&monitor).unwrap(), None);
    JobRecord::remove(&monitor).unwrap();
    let mut first = record(&monitor);
    first.create(&monitor).unwrap();
    let error = record(&monitor).create(&monitor).unwrap_err();
    assert!(matches!(error, JobRecordError::Busy(_)));
    let text = error.to_string();
    assert!(text.contains(&std::process::id().to_string()) && text.contains("/snapshot"), "{text}");
    assert!(matches!(resume(&monitor, &ResumeOptions::default()), Err(ResumeError::Record(JobRecordError::Busy(_)))));

    first.phase = JobPhase::Published;
    first.update(&monitor).unwrap();
    assert_eq!(JobRecord::read(&monitor).unwrap(), Some(first.clone()));

    unfinished(first.clone()).update(&monitor).unwrap();
    assert!(matches!(record(&monitor).create(&monitor).unwrap_err(), JobRecordError::LeftOver(_)));
    first.process.pid_scope = "another host".to_owned();
    first.update(&monitor).unwrap();
    assert!(matches!(record(&monitor).create(&monitor).unwrap_err(), JobRecordError::Elsewhere(_)));
    assert!(matches!(
        resume(&monitor, &ResumeOptions::default()),
        Err(ResumeError::Record(JobRecordError::Elsewhere(_)))
    ));
    let mut force = ResumeOptions::default();
    force.force = true;
    assert_eq!(resume(&monitor, &force).unwrap().takeover.outcome, Outcome::StoppedAsBefore);
    assert_eq!(JobRecord::read(&monitor).unwrap(), None);
}

#[test]
fn an_object_of_that_name_that_is_no_record_is_reported_and_not_trusted() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&["-S"]);
    let monitor = stock.monitor();
    monitor.object_add("secret", "limosa-job", json!({ "data": "nonsense" })).unwrap();
    assert!(matches!(record(&monitor).create(&monitor).unwrap_err(), JobRecordError::Unreadable { .. }));
    JobRecord::remove(&monitor).unwrap();
    record(&monitor).create(&monitor).unwrap();
}

#[test]
fn resume_leaves_a_running_vm_alone_and_asks_before_it_continues_one_that_is_not_limosas() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&[]);
    let monitor = stock.monitor();
    let plain = ResumeOptions::default();
    assert_eq!(resume(&monitor, &plain).unwrap().takeover.outcome, Outcome::Running);
    monitor.stop().unwrap();
    let error = resume(&monitor, &plain).unwrap_err();
    assert!(matches!(&error, ResumeError::NotOurs { why } if why.contains("it was stopped")), "{error}");
    assert_eq!(run_state(&monitor), RunState::Paused);
    let mut force = plain;
    force.force = true;
    assert_eq!(resume(&monitor, &force).unwrap().takeover.outcome, Outcome::Running);
    assert_eq!(run_state(&monitor), RunState::Running);
}

#[test]
fn resume_undoes_an_interrupted_save() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&[]);
    let monitor = stock.monitor();
    let before = monitor.settings().unwrap();
    let change = monitor
        .plan_settings(&Settings::new().capability("mapped-ram", true).parameter("max-bandwidth", 1 << 20))
        .unwrap();
    let mut job = unfinished(record(&monitor));
    job.undo = change.undo;
    job.create(&monitor).unwrap();
    monitor.apply_settings(&change.set).unwrap();
    monitor.migrate(&format!("file:{}", stock.path("half").display()), false).unwrap();
    eventually("active", || monitor.migration().unwrap().status == MigrationStatus::Active);
    let resumed = resume(&monitor, &ResumeOptions::default()).unwrap();
    assert_eq!(resumed.takeover.outcome, Outcome::Running);
    assert!(resumed.takeover.remarks.iter().any(|remark| remark.contains("cancelled")), "{:?}", resumed.takeover);
    assert_eq!(monitor.settings().unwrap(), before);
    assert_eq!(JobRecord::read(&monitor).unwrap(), None);
}

#[test]
fn a_client_answers_while_a_migration_runs_and_another_thread_waits_for_its_events() {
    if stock::skipped() {
        return;
    }
    let stock = Stock::start(&[]);
    let monitor = stock.monitor();
    monitor.apply_settings(&Settings::new().capability("events", true).parameter("max-bandwidth", 20 << 20)).unwrap();
    std::thread::scope(|scope| {
        let events = scope.spawn(|| {
            let mut states = Vec::new();
            while states.last().is_none_or(|state| state != "completed") {
                let event = monitor.qmp().wait_event(&["MIGRATION"], PATIENCE).unwrap().unwrap();
                states.push(event.data["status"].as_str().unwrap().to_owned());
            }
            states
        });
        monitor.migrate(&format!("file:{}", stock.path("out").display()), false).unwrap();
        eventually("completed", || monitor.migration().unwrap().status == MigrationStatus::Completed);
        assert_eq!(events.join().unwrap(), ["setup", "active", "device", "completed"]);
    });
    assert_eq!(monitor.qmp().execute("query-name", Value::Null).unwrap(), json!({}));
}
