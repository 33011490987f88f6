//! 4 KiB anywhere on encrypted disks, 16 at once.
//!
//! Law: `qemu-img bench` takes no secret, so both are servers: limosa and QEMU's storage daemon serve the same image at
//! a unix socket, and the client of the bench `serve` puts the load on. What socket and client allow is shown by limosa
//! serving the encrypted file as it is; what the processor allows by the cipher alone.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use limosa_image::luks::{CipherAlgorithm, CipherMode, IvGenerator, SectorCipher};

use super::images::Images;
use super::program::{LIMOSA, PEAK, words};
use crate::measure::{Measured, nanoseconds, own_cpu, peak_kib, process_cpu};
use crate::options::Options;
use crate::page_cache;
use crate::process::Process;
use crate::serve::client::{self, Load};
use crate::serve::servers::{Address, EXPORT, QEMU};

pub(super) const IOPS: &str = "iops";

/// limosa, of the encrypted bytes.
pub(super) const PLAIN: &str = "limosa, not decrypted";
pub(super) const CIPHER: &str = "cipher, one thread";
const CIPHERS: &str = "cipher, all cores";

/// The image whose disk it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disk {
    Luks,
    Qcow2,
}

/// A load on a disk.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub(super) name: String,
    pub(super) disk: Disk,
    pub(super) write: bool,
    pub(super) direct: bool,
}

/// The cells.
pub(super) fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for (disk, format) in [(Disk::Luks, "luks"), (Disk::Qcow2, "encrypted qcow2")] {
        for (write, verb) in [(false, "read"), (true, "write")] {
            for (direct, cache) in [(true, "direct"), (false, "cached")] {
                cells.push(Cell { name: format!("{format}, 4 KiB {verb}, {cache}"), disk, write, direct });
            }
        }
    }
    cells
}

impl Cell {
    /// The ways in which it is done.
    pub(super) fn variants(&self, has_stock: bool) -> Vec<&'static str> {
        let mut variants = if has_stock { vec![QEMU, LIMOSA] } else { vec![LIMOSA] };
        if self.disk == Disk::Luks && !self.write {
            variants.extend([PLAIN, CIPHER, CIPHERS]);
        }
        variants
    }

    /// Runs it once in one of these ways.
    pub(super) fn run(&self, images: &Images, variant: &str, options: &Options, size: u64) -> Result<Measured> {
        let count = (size >> 15).clamp(256, 30_000);
        let threads = match variant {
            CIPHER => 1,
            CIPHERS => thread::available_parallelism().map_or(1, usize::from),
            _ => return self.serve(images, variant, options, &Load { write: self.write, count, ..Load::new(size) }),
        };
        decipher(count, threads)
    }

    fn serve(&self, images: &Images, variant: &str, options: &Options, load: &Load) -> Result<Measured> {
        let mut command = self.server(images, variant, options)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let socket = images.output("socket");
        let server = Process::start(command, None)?;
        let mut clients = client::connect(&Address::Unix(socket), load)?;
        // The time for the key is not the disk's.
        client::run(&mut clients, &Load { count: 16, write: false, ..load.clone() })?;
        let before = process_cpu(server.pid())?;
        let outcome = client::run(&mut clients, load)?;
        let cpu = process_cpu(server.pid())?.saturating_sub(before);
        let peak = peak_kib(server.pid())?;
        Ok(rated(outcome.wall, cpu, load.count).with(PEAK, peak))
    }

    /// The command line of a server at the socket.
    fn server(&self, images: &Images, variant: &str, options: &Options) -> Result<Command> {
        let key = images.key()?;
        let image = if self.disk == Disk::Luks { images.luks()? } else { images.encrypted_qcow2()? };
        if !self.direct {
            page_cache::warm(&image)?;
        }
        let socket = images.output("socket");
        let direct = if self.direct { ",{}cache.direct=on" } else { "" };
        let nested = direct.replace("{}", "file.");
        let secret = "--object secret,id=s,file={}";
        let (program, line, paths) = match variant {
            QEMU => {
                let format = match self.disk {
                    Disk::Luks => "driver=luks,key-secret=s",
                    Disk::Qcow2 => "driver=qcow2,encrypt.format=luks,encrypt.key-secret=s",
                };
                let file = format!("driver=file,node-name=file,filename={{}},aio=io_uring{}", direct.replace("{}", ""));
                let line = format!(
                    "{secret} --blockdev {file} --blockdev {format},node-name=disk,file=file --nbd-server \
                     addr.type=unix,addr.path={{}},max-connections=0 \
                     --export type=nbd,id=export,node-name=disk,name={EXPORT},writable=on"
                );
                (QEMU.into(), line, vec![&key, &image, &socket])
            }
            _ => {
                let format = match (variant, self.disk) {
                    (PLAIN, _) => "driver=raw",
                    (_, Disk::Luks) => "driver=luks,key-secret=s",
                    (_, Disk::Qcow2) => "driver=qcow2,encrypt.key-secret=s",
                };
                let line = format!(
                    "serve {secret} --journal off --name {EXPORT} --nbd unix:{{}} --image-opts \
                     {format},file.filename={{}}{nested}"
                );
                (options.limosa()?, line, vec![&key, &socket, &image])
            }
        };
        let paths: Vec<_> = paths.into_iter().map(std::path::PathBuf::as_path).collect();
        let mut command = Command::new(program);
        command.args(words(&line, &paths)?);
        Ok(command)
    }
}

/// Decrypts as many blocks of 4 KiB on each thread.
fn decipher(count: u64, threads: usize) -> Result<Measured> {
    let key: Vec<u8> = (0..64).collect();
    let cipher = SectorCipher::new(CipherAlgorithm::Aes256, CipherMode::Xts, IvGenerator::Plain64, &key)?;
    let (begun, before) = (Instant::now(), own_cpu());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut block = [0x5a; 4096];
                for number in 0..count {
                    cipher.decrypt(number * 8, &mut block);
                }
                std::hint::black_box(block);
            });
        }
    });
    let blocks = count * u64::try_from(threads).context("threads")?;
    Ok(rated(begun.elapsed(), own_cpu().saturating_sub(before), blocks))
}

/// With requests a second.
fn rated(wall: Duration, cpu: Duration, requests: u64) -> Measured {
    let iops = u128::from(requests) * 1_000_000_000 / u128::from(nanoseconds(wall).max(1));
    Measured { wall, cpu, ..Measured::default() }.with(IOPS, u64::try_from(iops).unwrap_or(u64::MAX))
}
