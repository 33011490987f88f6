//! A database in a Linux guest, and a client outside that counts what it was promised.
//!
//! The guest's server is `sqlite3` behind a TCP port. Each request inserts a row into a table in the memory of that
//! process and into one in a file, with `synchronous=FULL`, and is answered when the transaction is over. Beside it a
//! shell writes numbered sectors behind the file system and reads them back from the disk.
//!
//! Law: **what a client saw acknowledged is in the guest's memory and on its disk.** The next answer counts the rows of
//! both tables, so a guest that has forgotten a request shows it at once. The client's TCP connection is state of the
//! guest as well: it breaks if the guest is older than what was seen of it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use limosa_testkit::{LinuxGuest, Vm, wait_for};

use crate::network::Namespace;

/// The guest's hardware address; its address is 10.9.0.2.
pub(crate) const GUEST_MAC: &str = "02:00:00:00:00:02";
/// Bytes of the file system at the beginning of the disk.
pub(crate) const FILE_SYSTEM: u64 = 24 << 20;
/// The first sector behind it.
const BEHIND: u64 = FILE_SYSTEM / 512;
/// Sectors that one boot of the guest may write there.
const SECTORS: u64 = 20_000;
/// Boots of the guest that there is room for.
const BOOTS: u64 = 8;
/// Bytes of the disk.
pub(crate) const DISK: u64 = FILE_SYSTEM + BOOTS * SECTORS * 512;
/// How long an answer may take; failovers are in it.
const ANSWER: Duration = Duration::from_secs(100);

/// The guest's programs.
pub(crate) fn guest() -> LinuxGuest {
    let sqlite = ["/usr/bin/sqlite3", "/bin/sqlite3"].iter().find(|path| std::path::Path::new(path).is_file());
    let sqlite = sqlite.unwrap_or_else(|| panic!("no sqlite3: run `cargo xtask setup`"));
    LinuxGuest { programs: vec![sqlite.into()], ..LinuxGuest::default() }
}

/// The server of a connection. Rows of earlier ones are in its memory too.
const SERVER: &str = "exec /host/ld.so --library-path /host /host/sqlite3 -batch -bail \
    -cmd \"PRAGMA synchronous=FULL\" -cmd \"ATTACH ':memory:' AS known\" \
    -cmd \"CREATE TABLE IF NOT EXISTS main.log(n INTEGER PRIMARY KEY, x TEXT)\" \
    -cmd \"CREATE TABLE known.log AS SELECT * FROM main.log\" /mnt/requests 2>&1";

/// Writes number n to sector n and reads it from the disk again, and that the next sector has nothing yet.
const SECTOR_WRITER: &str = "( n=0; at() { dd if=/dev/vda bs=512 skip=$((FIRST+$1)) count=1 iflag=direct 2>/dev/null \
    | tr -d \" \\000\"; }; while [ $n -lt LAST ]; do n=$((n+1)); printf %512d $n | \
    dd of=/dev/vda bs=512 seek=$((FIRST+n)) conv=notrunc,fsync oflag=direct 2>/dev/null || echo failed $n >> /tmp/torn; \
    [ \"$(at $n)\" = $n ] || echo old $n >> /tmp/torn; [ -z \"$(at $((n+1)))\" ] || echo future $n >> /tmp/torn; \
    echo $n > /tmp/sector; usleep 30000; done ) </dev/null >/dev/null 2>&1 &";

/// Starts the guest's servers: of requests at port 7, of shell lines at port 8. It has a disk, or keeps its file in
/// memory alone. `boot` counts the times that it has been started on this disk.
pub(crate) fn prepare(vm: &Vm, disk: Option<u64>) {
    vm.wait_counts(1).unwrap();
    let mut lines = vec![
        "ip link set eth0 up".to_owned(),
        "ip addr add 10.9.0.2/24 dev eth0".to_owned(),
        "arp -s 10.9.0.1 02:00:00:00:00:01".to_owned(),
        "mkdir -p /mnt".to_owned(),
        format!("printf '%s\\n' '#!/bin/sh' '{}' > /tmp/server", SERVER.replace('\'', "'\\''")),
        "chmod +x /tmp/server".to_owned(),
    ];
    if let Some(boot) = disk {
        assert!(boot < BOOTS, "no room for another boot");
        let first = BEHIND + boot * SECTORS;
        let writer = SECTOR_WRITER.replace("FIRST", &first.to_string()).replace("LAST", &(SECTORS - 2).to_string());
        lines.extend(["mount -t ext4 /dev/vda /mnt".to_owned(), "touch /tmp/torn".to_owned(), writer]);
    }
    for (port, program) in [(7, "/tmp/server"), (8, "sh")] {
        lines.push(format!("(while :; do nc -l -p {port} -e {program}; done) </dev/null >/dev/null 2>&1 &"));
    }
    for line in lines {
        vm.shell(&line).unwrap();
    }
}

/// A connection to a port of the guest's.
struct Connection {
    reader: BufReader<TcpStream>,
}

impl Connection {
    /// Connects as soon as the guest listens.
    fn open(network: &Namespace, port: u16) -> Self {
        let stream = wait_for("the guest to listen", || network.within(|| TcpStream::connect(("10.9.0.2", port)).ok()));
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(ANSWER)).unwrap();
        Self { reader: BufReader::new(stream) }
    }

    fn ask(&mut self, line: &str) -> Result<String, String> {
        let failed = |error: std::io::Error| format!("{error} at `{line}`");
        self.reader.get_mut().write_all(format!("{line}\n").as_bytes()).map_err(failed)?;
        let mut answer = String::new();
        match self.reader.read_line(&mut answer).map_err(failed)? {
            0 => Err(format!("the connection ended at `{line}`")),
            _ => Ok(answer.trim_end().to_owned()),
        }
    }
}

/// The text of request `n`.
fn text(n: u64) -> String {
    format!("{:016x}", n.wrapping_mul(0x9e37_79b9))
}

/// A condition for a row with another text than its number's.
const OTHER_TEXT: &str = "x <> printf('%016x', n * 2654435769)";

/// Counts of a client that outlive its connection.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// The last request that was acknowledged.
    acknowledged: AtomicU64,
    /// The last one that was sent.
    sent: AtomicU64,
    /// The longest wait for an answer, in milliseconds.
    longest: AtomicU64,
}

struct Shared {
    counts: Arc<Counts>,
    connection: Mutex<Connection>,
    /// Why it was not answered as it must be.
    failure: Mutex<Option<String>>,
    ended: AtomicBool,
}

/// A client that sends one request after the other on one TCP connection.
pub(crate) struct Client {
    shared: Arc<Shared>,
    stream: TcpStream,
    thread: Option<JoinHandle<()>>,
}

impl Client {
    /// Connects, and expects that the guest has every request that was acknowledged before.
    pub(crate) fn connect(network: &Namespace, counts: &Arc<Counts>) -> Self {
        let mut connection = Connection::open(network, 7);
        let has = connection.ask("SELECT 'has ' || count(*) || ' ' || ifnull(max(n), 0) FROM main.log;").unwrap();
        let (acknowledged, sent) = (counts.acknowledged(), counts.sent.load(Ordering::SeqCst));
        let newest: u64 = has.rsplit(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{has}"));
        assert_eq!(has, format!("has {newest} {newest}"), "a request is missing between others");
        assert!(newest >= acknowledged, "{acknowledged} requests were acknowledged, and the guest has {newest}");
        assert!(newest <= sent, "{sent} requests were sent, and the guest has {newest}");
        counts.acknowledged.store(newest, Ordering::SeqCst);
        let stream = connection.reader.get_ref().try_clone().unwrap();
        let shared = Arc::new(Shared {
            counts: Arc::clone(counts),
            connection: Mutex::new(connection),
            failure: Mutex::new(None),
            ended: AtomicBool::new(false),
        });
        let sending = Arc::clone(&shared);
        Self { shared, stream, thread: Some(thread::spawn(move || sending.send())) }
    }

    /// Expects that every answer was an acknowledgement of its request.
    #[track_caller]
    fn assert_answered(&self) {
        let failure = self.shared.failure.lock().unwrap().clone();
        assert!(failure.is_none(), "after {} requests: {failure:?}", self.shared.counts.acknowledged());
    }

    /// Waits until `count` more requests are acknowledged; false if `is_over` before.
    #[track_caller]
    pub(crate) fn is_answered(&self, count: u64, is_over: impl Fn() -> bool) -> bool {
        let wanted = self.shared.counts.acknowledged() + count;
        wait_for("acknowledgements", || {
            self.assert_answered();
            let over = is_over();
            (self.shared.counts.acknowledged() >= wanted).then_some(true).or(over.then_some(false))
        })
    }

    /// Waits until `count` more requests are acknowledged.
    #[track_caller]
    pub(crate) fn wait_answered(&self, count: u64) {
        self.is_answered(count, || false);
    }

    /// Compares the guest's memory with its disk, while no request is under way.
    #[track_caller]
    pub(crate) fn audit(&self, network: &Namespace, on_disk: bool) {
        let mut connection = self.shared.connection.lock().unwrap();
        self.assert_answered();
        let count = self.shared.counts.acknowledged();
        let known = connection.ask(&format!(
            "SELECT count(*), max(n), sum({OTHER_TEXT}) FROM known.log UNION ALL SELECT count(*), 0, 0 FROM \
             (SELECT * FROM known.log EXCEPT SELECT * FROM main.log);"
        ));
        let mut rest = String::new();
        connection.reader.read_line(&mut rest).unwrap();
        assert_eq!((known.as_deref(), rest.trim_end()), (Ok(&*format!("{count}|{count}|0")), "0|0|0"));
        // By a process that knows nothing yet, and from the disk.
        let mut shell = Connection::open(network, 8);
        let stored = format!(
            "sync; echo 3 > /proc/sys/vm/drop_caches; /host/ld.so --library-path /host /host/sqlite3 /mnt/requests \
             \"SELECT (SELECT * FROM pragma_integrity_check), count(*), max(n), sum({OTHER_TEXT}) FROM log\" 2>&1"
        );
        assert_eq!(shell.ask(&stored), Ok(format!("ok|{count}|{count}|0")), "the database on the disk");
        if on_disk {
            assert_eq!(shell.ask("echo torn: $(cat /tmp/torn)"), Ok("torn:".to_owned()), "sectors of another instant");
            // It may just be written.
            let mut sector = || shell.ask("echo $(cat /tmp/sector)").unwrap().parse::<u64>().ok();
            let before = wait_for("the number of a sector", &mut sector);
            wait_for("the guest to write sectors", || sector().filter(|now| *now > before));
        }
    }

    /// Ends it. Its connection may have been lost before.
    pub(crate) fn end(mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Shared {
    fn send(&self) {
        while !self.ended.load(Ordering::SeqCst) {
            let asked = Instant::now();
            let answered = self.send_one();
            let waited = u64::try_from(asked.elapsed().as_millis()).unwrap();
            self.counts.longest.fetch_max(waited, Ordering::SeqCst);
            if let Err(failure) = answered {
                *self.failure.lock().unwrap() = Some(failure);
                return;
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn send_one(&self) -> Result<(), String> {
        let mut connection = self.connection.lock().unwrap();
        let n = self.counts.acknowledged() + 1;
        self.counts.sent.fetch_max(n, Ordering::SeqCst);
        let answer = connection.ask(&format!(
            "BEGIN; INSERT INTO known.log VALUES({n}, '{text}'); INSERT INTO main.log VALUES({n}, '{text}'); COMMIT; \
             SELECT 'acknowledged ' || max(n) || ' ' || count(*) || ' ' || (SELECT count(*) FROM known.log) FROM \
             main.log;",
            text = text(n)
        ))?;
        if answer != format!("acknowledged {n} {n} {n}") {
            return Err(format!("{answer:?} after request {n}"));
        }
        self.counts.acknowledged.store(n, Ordering::SeqCst);
        Ok(())
    }
}

impl Counts {
    /// Requests that were acknowledged.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// The longest wait for an answer since this was asked last.
    pub(crate) fn take_longest(&self) -> Duration {
        Duration::from_millis(self.longest.swap(0, Ordering::SeqCst))
    }
}
