//! The heartbeat guest: a boot sector that walks memory, and the proof that a picture of that memory is consistent.
//!
//! What it does once the BIOS has started it: enters flat 32-bit protected mode; writes into every page of its span the
//! page's own address (at byte 4); then, pass after pass, stores the number of the pass at [`PASS_ADDRESS`], prints it
//! as eight hex digits and a newline on the first serial port, and bumps byte 0 of each page in ascending order.
//!
//! Law: at any instant the bumped bytes are `n+1` from the first page on and `n` from some page to the end (mod 256),
//! the addresses are right, and all other bytes of the span are zero. A page that was lost, is stale by any number of
//! passes but a multiple of 256, came twice in the wrong order or to the wrong place breaks that, and
//! [`check_heartbeat`] names it. The place in the walk is in the CPU's registers alone: devices and memory of different
//! instants break it too.

use std::ops::Range;

use anyhow::{Result, anyhow};

use crate::PAGE;

/// Guest physical address of the number of the guest's pass over memory, a little-endian u32.
const PASS_ADDRESS: u64 = 0x7e00;

/// Where the BIOS puts a boot sector.
const ORIGIN: usize = 0x7c00;
/// Where the guest puts its interrupt descriptor table: memory that the BIOS has no use for any more.
const IDT: u32 = 0x600;
/// The interrupt vector of the timer, and the first that the interrupt controller is set to use.
const TIMER_VECTOR: u8 = 0x20;

/// The walk of a heartbeat guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeartbeatGuest {
    /// First address of the span: a multiple of 4096, at or above 1 MiB.
    pub start: u32,
    /// Pages in the span, at least 2; it has to end below the last 4 MiB of RAM and below 2 GiB.
    pub pages: u32,
    /// Turns of an empty loop after each page; 0 for none. Slows the walk down, not the CPU.
    pub delay: u32,
    /// Timer ticks of 10 ms that the CPU halts for after each pass; 0 for none. Lets the host's CPU rest.
    pub rest: u32,
}

impl Default for HeartbeatGuest {
    /// 16 MiB from 1 MiB on, one tick of rest per pass.
    fn default() -> Self {
        Self { start: 1 << 20, pages: 4096, delay: 0, rest: 1 }
    }
}

impl HeartbeatGuest {
    /// A guest that walks `bytes` of memory from 1 MiB on.
    pub fn over(bytes: u64) -> Self {
        Self { pages: u32::try_from(bytes / PAGE).unwrap_or(u32::MAX), ..Self::default() }
    }

    /// The span in bytes of guest physical address.
    pub fn span(&self) -> Range<u64> {
        let start = u64::from(self.start);
        start..start + u64::from(self.pages) * PAGE
    }

    /// Proves that the memory and the CPU of a guest that is stopped are of one instant. `read` reads guest physical
    /// memory.
    ///
    /// # Errors
    /// Memory cannot be read; a [`HeartbeatError`] (by downcast) if they are not.
    pub fn check(&self, mut read: impl FnMut(Range<u64>) -> Result<Vec<u8>>) -> Result<Heartbeat> {
        let (span, pass) = (read(self.span())?, Self::pass(&mut read)?);
        Ok(check_heartbeat(&span, self.start)?.check_pass(pass, self.pages)?)
    }

    /// Returns the number of the pass that the guest keeps itself. `read` reads guest physical memory.
    ///
    /// # Errors
    /// Memory cannot be read.
    pub fn pass(mut read: impl FnMut(Range<u64>) -> Result<Vec<u8>>) -> Result<u32> {
        let pass = read(PASS_ADDRESS..PASS_ADDRESS + 4)?;
        pass.try_into().map(u32::from_le_bytes).map_err(|_| anyhow!("the number of the pass is cut off"))
    }

    /// The boot sector: 510 bytes of code and the boot signature.
    pub fn boot_sector(&self) -> [u8; 512] {
        let mut a = Assembler::default();
        // 16-bit real mode, at 0000:7c00 with the BIOS's interrupts on.
        a.op(&[0xfa]); // cli
        a.op(&[0x31, 0xc0]); // xor ax, ax
        a.op(&[0x8e, 0xd8]); // mov ds, ax
        a.op(&[0xe4, 0x92]); // in al, 0x92           system control port A:
        a.op(&[0x0c, 0x02]); // or al, 2                address line 20 on,
        a.op(&[0x24, 0xfe]); // and al, 0xfe            no reset
        a.op(&[0xe6, 0x92]); // out 0x92, al
        a.op(&[0x0f, 0x01, 0x16]).address16("gdtr"); // lgdt [gdtr]
        a.op(&[0x0f, 0x20, 0xc0]); // mov eax, cr0
        a.op(&[0x0c, 0x01]); // or al, 1
        a.op(&[0x0f, 0x22, 0xc0]); // mov cr0, eax    protected mode
        a.op(&[0xea]).address16("flat").word(0x08); // jmp 0x08:flat
        // 32-bit protected mode, interrupts off.
        a.label("flat");
        a.op(&[0x66, 0xb8, 0x10, 0x00]); // mov ax, 0x10
        a.op(&[0x8e, 0xd8]); // mov ds, ax
        a.op(&[0x8e, 0xc0]); // mov es, ax
        a.op(&[0x8e, 0xd0]); // mov ss, ax
        a.op(&[0xbc]).long(0x7c00); // mov esp, 0x7c00
        serial_port(&mut a);
        if self.rest > 0 {
            timer(&mut a);
        }
        // Every page learns its address.
        a.op(&[0xbf]).long(self.start); // mov edi, start
        a.op(&[0xb9]).long(self.pages); // mov ecx, pages
        a.label("sign");
        a.op(&[0x89, 0x7f, 0x04]); // mov [edi+4], edi
        a.op(&[0x81, 0xc7]).long(4096); // add edi, 4096
        a.op(&[0x49]); // dec ecx
        a.op(&[0x75]).near("sign"); // jnz sign
        a.op(&[0x31, 0xed]); // xor ebp, ebp
        // One pass: count, print, walk, rest.
        a.label("walk");
        a.op(&[0x45]); // inc ebp
        a.op(&[0x89, 0x2d]).long(u32::try_from(PASS_ADDRESS).unwrap_or(0)); // mov [PASS_ADDRESS], ebp
        a.op(&[0x89, 0xe8]); // mov eax, ebp
        a.op(&[0xbe]).long(8); // mov esi, 8
        a.label("digit");
        a.op(&[0xc1, 0xc0, 0x04]); // rol eax, 4      the highest digit first
        a.op(&[0x50]); // push eax
        a.op(&[0x24, 0x0f]); // and al, 0x0f
        a.op(&[0x04, 0x30]); // add al, '0'
        a.op(&[0x3c, 0x39]); // cmp al, '9'
        a.op(&[0x76]).near("send"); // jbe send
        a.op(&[0x04, 0x27]); // add al, 'a'-'9'-1
        a.label("send");
        a.op(&[0xe8]).far("put"); // call put
        a.op(&[0x58]); // pop eax
        a.op(&[0x4e]); // dec esi
        a.op(&[0x75]).near("digit"); // jnz digit
        a.op(&[0xb0, 0x0a]); // mov al, newline
        a.op(&[0xe8]).far("put"); // call put
        a.op(&[0xbf]).long(self.start); // mov edi, start
        a.op(&[0xb9]).long(self.pages); // mov ecx, pages
        a.label("page");
        a.op(&[0xfe, 0x07]); // inc byte [edi]
        if self.delay > 0 {
            a.op(&[0xbe]).long(self.delay); // mov esi, delay
            a.label("pause");
            a.op(&[0x4e]); // dec esi
            a.op(&[0x75]).near("pause"); // jnz pause
        }
        a.op(&[0x81, 0xc7]).long(4096); // add edi, 4096
        a.op(&[0x49]); // dec ecx
        a.op(&[0x75]).near("page"); // jnz page
        if self.rest > 0 {
            a.op(&[0xbe]).long(self.rest); // mov esi, rest
            a.label("rest");
            a.op(&[0xfb]); // sti                     takes effect after the next instruction: no tick is missed
            a.op(&[0xf4]); // hlt
            a.op(&[0xfa]); // cli
            a.op(&[0x4e]); // dec esi
            a.op(&[0x75]).near("rest"); // jnz rest
        }
        a.op(&[0xe9]).far("walk"); // jmp walk
        // put: al to the serial port; changes ah and edx.
        a.label("put");
        a.op(&[0x88, 0xc4]); // mov ah, al
        a.op(&[0xba]).long(0x3fd); // mov edx, 0x3fd  line status
        a.label("busy");
        a.op(&[0xec]); // in al, dx
        a.op(&[0xa8, 0x20]); // test al, 0x20         transmitter empty?
        a.op(&[0x74]).near("busy"); // jz busy
        a.op(&[0x88, 0xe0]); // mov al, ah
        a.op(&[0xb2, 0xf8]); // mov dl, 0xf8          data
        a.op(&[0xee]); // out dx, al
        a.op(&[0xc3]); // ret
        descriptor_tables(&mut a);
        a.sector()
    }
}

/// 8 data bits, no parity, one stop bit, no interrupts; the speed does not matter to an emulated port.
fn serial_port(a: &mut Assembler) {
    a.op(&[0xba]).long(0x3fb); // mov edx, 0x3fb      line control
    a.op(&[0xb0, 0x03]); // mov al, 3
    a.op(&[0xee]); // out dx, al
    a.op(&[0xb2, 0xf9]); // mov dl, 0xf9              interrupt enable
    a.op(&[0xb0, 0x00]); // mov al, 0
    a.op(&[0xee]); // out dx, al
}

/// A timer interrupt every 10 ms whose handler does nothing: it only ends a `hlt`.
fn timer(a: &mut Assembler) {
    let gate = IDT + 8 * u32::from(TIMER_VECTOR);
    a.op(&[0xc7, 0x05]).long(gate).address16("tick").word(0x08); // mov dword [gate], tick + (0x08 << 16)
    a.op(&[0xc7, 0x05]).long(gate + 4).long(0x8e00); // mov dword [gate+4], present, 32-bit interrupt gate
    a.op(&[0x0f, 0x01, 0x1d]).address32("idtr"); // lidt [idtr]
    for (value, port) in [
        (0x11, 0x20),         // ICW1: initialize, ICW4 follows
        (TIMER_VECTOR, 0x21), // ICW2: first vector
        (0x04, 0x21),         // ICW3: the second controller is at input 2
        (0x01, 0x21),         // ICW4: 8086 mode
        (0xfe, 0x21),         // mask: only the timer
        (0x34, 0x43),         // timer channel 0, low and high byte, rate generator
        (0x9c, 0x40),         // 1193182 Hz / 11932 = 100 Hz
        (0x2e, 0x40),
    ] {
        a.op(&[0xb0, value]); // mov al, value
        a.op(&[0xe6, port]); // out port, al
    }
    a.op(&[0xeb]).near("timed"); // jmp timed
    a.label("tick");
    a.op(&[0x50]); // push eax
    a.op(&[0xb0, 0x20]); // mov al, 0x20              end of interrupt
    a.op(&[0xe6, 0x20]); // out 0x20, al
    a.op(&[0x58]); // pop eax
    a.op(&[0xcf]); // iretd
    a.label("idtr");
    a.word(8 * (u16::from(TIMER_VECTOR) + 1) - 1).long(IDT);
    a.label("timed");
}

/// Two flat 4 GiB segments: code at selector 0x08, data at 0x10.
fn descriptor_tables(a: &mut Assembler) {
    a.label("gdt");
    a.op(&[0, 0, 0, 0, 0, 0, 0, 0]);
    a.op(&[0xff, 0xff, 0, 0, 0, 0x9a, 0xcf, 0]);
    a.op(&[0xff, 0xff, 0, 0, 0, 0x92, 0xcf, 0]);
    a.label("gdtr");
    a.word(23).address32("gdt");
}

/// Bytes with labels: as much of an assembler as one sector needs.
#[derive(Default)]
struct Assembler {
    code: Vec<u8>,
    labels: Vec<(&'static str, usize)>,
    holes: Vec<Hole>,
}

/// A place that a label's value goes to once all labels are known.
struct Hole {
    at: usize,
    label: &'static str,
    /// Bytes of the value.
    width: usize,
    /// Counted from the end of the value (a jump) instead of absolute.
    relative: bool,
}

impl Assembler {
    fn op(&mut self, bytes: &[u8]) -> &mut Self {
        self.code.extend_from_slice(bytes);
        self
    }

    fn word(&mut self, value: u16) -> &mut Self {
        self.op(&value.to_le_bytes())
    }

    fn long(&mut self, value: u32) -> &mut Self {
        self.op(&value.to_le_bytes())
    }

    fn hole(&mut self, label: &'static str, width: usize, relative: bool) -> &mut Self {
        self.holes.push(Hole { at: self.code.len(), label, width, relative });
        self.code.extend(std::iter::repeat_n(0, width));
        self
    }

    fn address16(&mut self, label: &'static str) -> &mut Self {
        self.hole(label, 2, false)
    }

    fn address32(&mut self, label: &'static str) -> &mut Self {
        self.hole(label, 4, false)
    }

    fn near(&mut self, label: &'static str) -> &mut Self {
        self.hole(label, 1, true)
    }

    fn far(&mut self, label: &'static str) -> &mut Self {
        self.hole(label, 4, true)
    }

    fn label(&mut self, label: &'static str) {
        self.labels.push((label, self.code.len()));
    }

    fn sector(mut self) -> [u8; 512] {
        for Hole { at, label, width, relative } in std::mem::take(&mut self.holes) {
            let found = self.labels.iter().find(|(name, _)| *name == label);
            let target = found.unwrap_or_else(|| panic!("the boot sector has no label {label}")).1;
            let value = if relative { target.wrapping_sub(at + width) } else { ORIGIN + target };
            if relative && width == 1 {
                let distance = value.wrapping_add(128);
                assert!(distance < 256, "{label} is too far for a short jump");
            }
            self.code[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
        assert!(self.code.len() <= 510, "the boot sector's code has {} bytes", self.code.len());
        let mut sector = [0; 512];
        sector[..self.code.len()].copy_from_slice(&self.code);
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        sector
    }
}

/// The position in the walk that a consistent span shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// Byte 0 of the first page: the current pass's number mod 256.
    pub ahead: u8,
    /// Pages that hold `ahead`; the rest is one behind. At least 1; all pages between two passes.
    pub pages_ahead: u64,
}

/// Why a span is not consistent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeartbeatError {
    /// The picture is empty or ends within a page.
    #[error("the picture of the span has {0} bytes: not a whole number of pages")]
    Length(usize),
    /// The page does not hold its own address: it was lost or belongs elsewhere.
    #[error("page {page} holds the address {found:#x} instead of {expected:#x}: it is lost or another page")]
    Address {
        /// Index of the page in the span.
        page: u64,
        /// Its address.
        expected: u32,
        /// The address that it holds.
        found: u32,
    },
    /// Bytes that the guest never writes are not zero.
    #[error("page {page}: byte {offset} was changed, but the guest never writes it")]
    Foreign {
        /// Index of the page in the span.
        page: u64,
        /// Byte in the page.
        offset: usize,
    },
    /// The order of the walk is broken.
    #[error("page {page} holds {found} behind a page with {before}: allowed are {before} and, once, one less")]
    Order {
        /// Index of the page in the span.
        page: u64,
        /// The value of the page before it.
        before: u8,
        /// Its value.
        found: u8,
    },
    /// Memory and the guest's own count are of different instants.
    #[error("the span is in pass {ahead} (mod 256), the guest counts pass {pass}")]
    Pass {
        /// Byte 0 of the first page.
        ahead: u8,
        /// The guest's count.
        pass: u32,
    },
}

/// Proves that `span`, a picture of the guest's whole span that begins at address `start`, is of one instant.
///
/// # Errors
/// The first page that breaks the law.
pub fn check_heartbeat(span: &[u8], start: u32) -> Result<Heartbeat, HeartbeatError> {
    let (pages, rest) = span.as_chunks::<4096>();
    let Some(first) = pages.first().filter(|_| rest.is_empty()) else { return Err(HeartbeatError::Length(span.len())) };
    let ahead = first[0];
    let mut before = ahead;
    let mut pages_ahead = 0;
    let mut expected = start;
    for (page, bytes) in (0..).zip(pages) {
        let found = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        if found != expected {
            return Err(HeartbeatError::Address { page, expected, found });
        }
        let foreign = |&(offset, &byte): &(usize, &u8)| byte != 0 && offset != 0 && !(4..8).contains(&offset);
        if bytes[1..4] != ZEROS[1..4] || bytes[8..] != ZEROS[8..] {
            let offset = bytes.iter().enumerate().find(foreign).map_or(0, |(offset, _)| offset);
            return Err(HeartbeatError::Foreign { page, offset });
        }
        let found = bytes[0];
        if found != before && !(before == ahead && found == ahead.wrapping_sub(1)) {
            return Err(HeartbeatError::Order { page, before, found });
        }
        before = found;
        pages_ahead += u64::from(found == ahead);
        expected = expected.wrapping_add(4096);
    }
    Ok(Heartbeat { ahead, pages_ahead })
}

const ZEROS: [u8; 4096] = [0; 4096];

/// Returns the numbers of passes in what a guest has printed, of whole lines.
pub fn pass_numbers(printed: &str) -> Vec<u32> {
    let whole = printed.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(str::trim).filter_map(pass_number).collect()
}

/// `0000002a`: eight hex digits.
pub(crate) fn pass_number(line: &str) -> Option<u32> {
    if line.len() == 8 { u32::from_str_radix(line, 16).ok() } else { None }
}

impl Heartbeat {
    /// Checks the heartbeat against the number of the pass that the guest keeps itself, at a fixed address; `pages` is
    /// the span's length.
    pub fn check_pass(self, pass: u32, pages: u32) -> Result<Self, HeartbeatError> {
        let [low, ..] = pass.to_le_bytes();
        // Counted, but the first page not yet bumped: then all pages still show the pass before.
        let just_begun = self.pages_ahead == u64::from(pages) && self.ahead.wrapping_add(1) == low;
        if self.ahead == low || just_begun { Ok(self) } else { Err(HeartbeatError::Pass { ahead: self.ahead, pass }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u32 = 1 << 20;

    fn span(values: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; values.len() * 4096];
        for ((page, &value), address) in bytes.chunks_mut(4096).zip(values).zip((START..).step_by(4096)) {
            page[0] = value;
            page[4..8].copy_from_slice(&address.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn one_step_down_is_consistent_wherever_it_is() {
        assert_eq!(check_heartbeat(&span(&[5, 5, 4, 4]), START), Ok(Heartbeat { ahead: 5, pages_ahead: 2 }));
        assert_eq!(check_heartbeat(&span(&[5, 5, 5, 5]), START), Ok(Heartbeat { ahead: 5, pages_ahead: 4 }));
        assert_eq!(check_heartbeat(&span(&[0, 255, 255, 255]), START), Ok(Heartbeat { ahead: 0, pages_ahead: 1 }));
    }

    #[test]
    fn a_stale_a_fresh_or_a_swapped_page_is_found() {
        let order = |page, before, found| Err(HeartbeatError::Order { page, before, found });
        assert_eq!(check_heartbeat(&span(&[5, 4, 5, 4]), START), order(2, 4, 5));
        assert_eq!(check_heartbeat(&span(&[5, 4, 3, 3]), START), order(2, 4, 3));
        assert_eq!(check_heartbeat(&span(&[5, 6, 6, 6]), START), order(1, 5, 6));
        assert_eq!(check_heartbeat(&span(&[5, 5, 3, 4]), START), order(2, 5, 3));
        let mut swapped = span(&[5, 5, 5, 5]);
        let (left, right) = swapped.split_at_mut(8192);
        left[4096..].swap_with_slice(&mut right[..4096]);
        assert!(matches!(check_heartbeat(&swapped, START), Err(HeartbeatError::Address { page: 1, .. })));
    }

    #[test]
    fn a_page_of_zeros_and_a_single_changed_byte_are_found() {
        let mut lost = span(&[5, 5, 4, 4]);
        lost[8192..12288].fill(0);
        assert!(matches!(check_heartbeat(&lost, START), Err(HeartbeatError::Address { page: 2, found: 0, .. })));
        for offset in [1, 3, 8, 4095] {
            let mut touched = span(&[5, 5, 4, 4]);
            touched[4096 * 3 + offset] = 1;
            assert_eq!(check_heartbeat(&touched, START), Err(HeartbeatError::Foreign { page: 3, offset }));
        }
        assert_eq!(check_heartbeat(&[0; 100], START), Err(HeartbeatError::Length(100)));
        assert_eq!(check_heartbeat(&[], START), Err(HeartbeatError::Length(0)));
    }

    #[test]
    fn the_pass_that_the_guest_counts_must_be_the_one_the_span_shows() {
        let beat = |ahead, pages_ahead| Heartbeat { ahead, pages_ahead };
        assert!(beat(5, 2).check_pass(0x105, 4).is_ok());
        assert!(beat(5, 2).check_pass(6, 4).is_err(), "the next pass cannot begin before this one ends");
        assert!(beat(5, 4).check_pass(6, 4).is_ok() && beat(5, 4).check_pass(5, 4).is_ok());
        assert!(beat(255, 4).check_pass(0x100, 4).is_ok());
        assert!(beat(5, 4).check_pass(7, 4).is_err());
    }

    #[test]
    fn every_variant_of_the_guest_fits_into_a_boot_sector() {
        for (delay, rest) in [(0, 0), (0, 3), (1000, 0), (1000, 3)] {
            let sector = HeartbeatGuest { delay, rest, ..HeartbeatGuest::default() }.boot_sector();
            assert_eq!(sector[510..], [0x55, 0xaa]);
            assert_eq!(sector[0], 0xfa);
        }
    }
}
