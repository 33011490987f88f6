//! The guest: firmware of a few hundred bytes that sends a heartbeat to the serial port a thousand times a second, and
//! does what a byte from there asks for.
//!
//! It sleeps between two heartbeats, so that it costs the host next to nothing. A timer interrupt wakes it, or a byte
//! that arrives, and both need its memory: vectors and stack are in page 0, its code is in the firmware's own RAM
//! block.
//!
//! Its tasks work on the contents of its memory, which begin at [`CONTENTS_AT`]. Each is answered once it is done.

use anyhow::{Context, Result};

/// Bytes of the firmware's image; QEMU takes multiples of 64 KiB.
const LEN: usize = 0x1_0000;
/// Where the CPU starts (with 20 address bits: `f000:fff0`).
const RESET: usize = 0xfff0;
/// The image's address below 1 MiB.
const IMAGE_AT: u32 = 0xf_0000;

/// The byte of a heartbeat on the serial port.
pub(crate) const BEAT: u8 = b'.';

/// Guest physical address of the contents.
pub(crate) const CONTENTS_AT: u32 = 1 << 20;
/// The address of the amount of contents that the guest reads: a little-endian u32, in units of 64 bytes.
pub(crate) const READ_LEN_AT: u32 = 0x500;
/// Bytes that a turn of the reading loop adds up.
const UNIT: u64 = 64;
/// The most that [`Task::Read`] reads, in bytes.
const READ_MOST: u64 = 256 << 20;
/// Pages that [`Task::Write`] and [`Task::Rewrite`] write: 32 MiB.
pub(crate) const WRITTEN_PAGES: u32 = 8192;
/// Pages that [`Task::WriteMore`] writes: 57 MiB.
const MORE_PAGES: u32 = 57 << 8;
/// Pieces of contents that [`Task::WriteScattered`] writes: 8 MiB together.
const SCATTERED_PIECES: u32 = 128;
/// Pages of such a piece, which are next to each other.
const SCATTERED_PAGES: u8 = 16;
/// Bytes of contents that the pieces are scattered over.
const SCATTERED_SPAN: u32 = 512 << 20;
/// Bytes from a piece to the next one, round and round in the span: 0.618 of it, in whole pieces and an odd number of
/// them, so that no order shows and no piece is met twice.
const SCATTERED_STRIDE: u32 = 5063 << 16;

/// A command of the guest: the byte that asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Reads as much of the contents as [`READ_LEN_AT`] says, once; the answer ends with [`sum`] of that.
    Read,
    /// Adds 1 to the first word of each of the first [`WRITTEN_PAGES`] pages of the contents.
    Write,
    /// The same with 57 MiB of pages.
    WriteMore,
    /// Writes each of those pages' address into its first word: the same at every time.
    Rewrite,
    /// Adds 1 to the first word of each page of 128 pieces of 64 KiB, scattered over the first 512 MiB of the contents.
    WriteScattered,
    /// From now on a heartbeat 18 times a second, so that many guests together cost next to nothing.
    Slow,
}

impl Task {
    /// The byte on the serial port that asks for it.
    pub(crate) fn byte(self) -> u8 {
        match self {
            Self::Read => b'r',
            Self::Write => b'w',
            Self::WriteMore => b'm',
            Self::Rewrite => b'e',
            Self::WriteScattered => b'c',
            Self::Slow => b's',
        }
    }

    /// The first byte of the answer.
    pub(crate) fn answer(self) -> u8 {
        self.byte().to_ascii_uppercase()
    }
}

/// The sum of all little-endian 32-bit words, as the guest finds it.
pub(crate) fn sum(contents: &[u8]) -> u32 {
    contents.as_chunks().0.iter().fold(0, |sum: u32, word| sum.wrapping_add(u32::from_le_bytes(*word)))
}

/// Bytes that [`Task::Read`] reads of contents of this length.
pub(crate) fn read_len(contents: u64) -> u64 {
    contents.min(READ_MOST) / UNIT * UNIT
}

/// The value at [`READ_LEN_AT`] for contents of this length, in bytes.
pub(crate) fn read_units(contents: u64) -> Result<u32> {
    u32::try_from(read_len(contents) / UNIT).context("more contents than the guest can read")
}

/// 16-bit code at f000:0000. What is jumped to comes before what jumps there.
#[derive(Default)]
struct Code(Vec<u8>);

impl Code {
    /// Appends bytes; returns where they begin.
    fn op(&mut self, bytes: &[u8]) -> usize {
        let at = self.0.len();
        self.0.extend_from_slice(bytes);
        at
    }

    /// An instruction with a 32-bit immediate.
    fn long(&mut self, opcode: &[u8], value: u32) {
        self.op(opcode);
        self.op(&value.to_le_bytes());
    }

    /// The address of `place` in this segment, behind an opcode.
    fn address(&mut self, opcode: &[u8], place: usize) {
        self.op(opcode);
        self.op(&u16::try_from(place).unwrap_or(u16::MAX).to_le_bytes());
    }

    /// A call or jump with a 16-bit distance.
    fn far(&mut self, opcode: u8, place: usize) {
        let next = self.0.len() + 3;
        let [low, high, ..] = place.wrapping_sub(next).to_le_bytes();
        self.op(&[opcode, low, high]);
    }

    /// A jump back with an 8-bit distance.
    fn back(&mut self, opcode: u8, place: usize) {
        let distance = place.wrapping_sub(self.0.len() + 2);
        debug_assert!(distance.wrapping_add(128) < 256, "too far for a short jump");
        self.op(&[opcode, distance.to_le_bytes()[0]]);
    }

    /// `mov al, value; out port, al` for each.
    fn outputs(&mut self, values: &[(u8, u8)]) {
        for &(value, port) in values {
            self.op(&[0xb0, value, 0xe6, port]);
        }
    }
}

const CALL: u8 = 0xe8;
const JMP: u8 = 0xe9;
const JMP_SHORT: u8 = 0xeb;
const JZ: u8 = 0x74;
const JNZ: u8 = 0x75;
const LOOP: u8 = 0xe2;

/// The image for QEMU's `-bios`.
pub(crate) fn firmware() -> Vec<u8> {
    let mut code = Code::default();
    let gdt = code.op(&[0; 8]);
    code.op(&[0xff, 0xff, 0, 0, 0, 0x92, 0xcf, 0]); // selector 8: data, 4 GiB
    let gdtr = code.op(&[15, 0]);
    let linear = IMAGE_AT + u32::try_from(gdt).unwrap_or(0);
    code.op(&linear.to_le_bytes());
    let wake = code.op(&[
        0x50, // push ax
        0xb0, 0x20, // mov al, 0x20: end of interrupt
        0xe6, 0x20, // out 0x20, al
        0x58, // pop ax
        0xcf, // iret
    ]);
    let put = put(&mut code);
    let commands = [
        (Task::Read, read(&mut code, put)),
        (Task::Write, write(&mut code, put, Task::Write, WRITTEN_PAGES)),
        (Task::WriteMore, write(&mut code, put, Task::WriteMore, MORE_PAGES)),
        (Task::Rewrite, write(&mut code, put, Task::Rewrite, WRITTEN_PAGES)),
        (Task::WriteScattered, write_scattered(&mut code, put)),
        (Task::Slow, slow(&mut code, put)),
    ];
    let start = start(&mut code, gdtr, wake);
    beats(&mut code, &commands);
    let mut image = code.0;
    image.resize(RESET, 0xf4);
    let [low, high, ..] = start.to_le_bytes();
    image.extend([0xea, low, high, 0x00, 0xf0]); // jmp f000:start
    image.resize(LEN, 0xf4);
    image
}

/// Sends al as soon as the port takes it; changes ax and dx.
fn put(code: &mut Code) -> usize {
    let put = code.op(&[
        0x88, 0xc4, // mov ah, al
        0xba, 0xfd, 0x03, // mov dx, 0x3fd: line status
    ]);
    let busy = code.op(&[0xec, 0xa8, 0x20]); // in al, dx; test al, 0x20: transmitter empty?
    code.back(JZ, busy);
    code.op(&[
        0x88, 0xe0, // mov al, ah
        0xb2, 0xf8, // mov dl, 0xf8: data
        0xee, // out dx, al
        0xc3, // ret
    ]);
    put
}

/// [`Task::Read`].
fn read(code: &mut Code, put: usize) -> usize {
    let read = code.op(&[0x66, 0x31, 0xc0]); // xor eax, eax
    code.long(&[0x66, 0xbf], CONTENTS_AT); // mov edi, CONTENTS_AT
    code.op(&[0x66, 0x8b, 0x0e]); // mov ecx, [READ_LEN_AT]
    let [low, high, ..] = READ_LEN_AT.to_le_bytes();
    code.op(&[low, high]);
    let again = code.0.len();
    for offset in (0..64).step_by(4) {
        code.op(&[0x26, 0x67, 0x66, 0x03, 0x47, offset]); // add eax, es:[edi + offset]
    }
    code.op(&[
        0x66, 0x83, 0xc7, 0x40, // add edi, 64
        0x66, 0x49, // dec ecx
    ]);
    code.back(JNZ, again);
    code.op(&[0x66, 0x50, 0xb0, Task::Read.answer()]); // push eax; mov al, answer
    code.far(CALL, put);
    code.op(&[0x66, 0x58, 0xb9, 0x04, 0x00]); // pop eax; mov cx, 4
    let byte = code.op(&[0x66, 0x50]); // push eax
    code.far(CALL, put);
    code.op(&[0x66, 0x58, 0x66, 0xc1, 0xe8, 0x08]); // pop eax; shr eax, 8
    code.back(LOOP, byte);
    code.op(&[0xc3]); // ret
    read
}

/// A task that writes a word into each of the first pages.
fn write(code: &mut Code, put: usize, task: Task, pages: u32) -> usize {
    let write = code.0.len();
    code.long(&[0x66, 0xbf], CONTENTS_AT); // mov edi, CONTENTS_AT
    code.long(&[0x66, 0xb9], pages); // mov ecx, pages
    let again = code.op(match task {
        Task::Rewrite => &[0x26, 0x67, 0x66, 0x89, 0x3f], // mov es:[edi], edi
        _ => &[0x26, 0x67, 0x66, 0xff, 0x07],             // inc dword es:[edi]
    });
    code.long(&[0x66, 0x81, 0xc7], 4096); // add edi, 4096
    code.op(&[0x66, 0x49]); // dec ecx
    code.back(JNZ, again);
    code.op(&[0xb0, task.answer()]); // mov al, answer
    code.far(JMP, put);
    write
}

/// [`Task::WriteScattered`].
fn write_scattered(code: &mut Code, put: usize) -> usize {
    let scattered = code.op(&[0x66, 0x31, 0xdb]); // xor ebx, ebx
    code.long(&[0x66, 0xb9], SCATTERED_PIECES); // mov ecx, pieces
    let piece = code.0.len();
    code.long(&[0x67, 0x66, 0x8d, 0xbb], CONTENTS_AT); // lea edi, [ebx + CONTENTS_AT]
    code.op(&[0xb2, SCATTERED_PAGES]); // mov dl, pages
    let page = code.op(&[0x26, 0x67, 0x66, 0xff, 0x07]); // inc dword es:[edi]
    code.long(&[0x66, 0x81, 0xc7], 4096); // add edi, 4096
    code.op(&[0xfe, 0xca]); // dec dl
    code.back(JNZ, page);
    code.long(&[0x66, 0x81, 0xc3], SCATTERED_STRIDE); // add ebx, stride
    code.long(&[0x66, 0x81, 0xe3], SCATTERED_SPAN - 1); // and ebx, span - 1
    code.op(&[0x66, 0x49]); // dec ecx
    code.back(JNZ, piece);
    code.op(&[0xb0, Task::WriteScattered.answer()]); // mov al, answer
    code.far(JMP, put);
    scattered
}

/// [`Task::Slow`].
fn slow(code: &mut Code, put: usize) -> usize {
    let slow = code.0.len();
    code.outputs(&[(0x34, 0x43), (0, 0x40), (0, 0x40)]); // 1193182 Hz / 65536 = 18.2 Hz, the slowest
    code.op(&[0xb0, Task::Slow.answer()]); // mov al, answer
    code.far(JMP, put);
    slow
}

/// From reset to the first heartbeat: a timer interrupt, and all memory in reach of es.
fn start(code: &mut Code, gdtr: usize, wake: usize) -> usize {
    let start = code.op(&[
        0xfa, // cli
        0x31, 0xc0, // xor ax, ax
        0x8e, 0xd8, // mov ds, ax
        0x8e, 0xd0, // mov ss, ax
        0xbc, 0x00, 0x10, // mov sp, 0x1000
        0xe4, 0x92, 0x0c, 0x02, 0x24, 0xfe, 0xe6, 0x92, // address line 20 on, no reset (system control port A)
    ]);
    code.address(&[0x2e, 0x0f, 0x01, 0x16], gdtr); // lgdt cs:[gdtr]
    code.op(&[
        0x0f, 0x20, 0xc0, // mov eax, cr0
        0x0c, 0x01, // or al, 1: protected mode for a moment, in which es gets a limit of 4 GiB, which stays
        0x0f, 0x22, 0xc0, // mov cr0, eax
        0xbb, 0x08, 0x00, // mov bx, 8
        0x8e, 0xc3, // mov es, bx
        0x24, 0xfe, // and al, 0xfe
        0x0f, 0x22, 0xc0, // mov cr0, eax
        0x66, 0xb9, 0x1b, 0x00, 0x00, 0x00, // mov ecx, 0x1b: the local APIC off,
        0x0f, 0x32, // rdmsr                              so that the timer's interrupt
        0x80, 0xe4, 0xf7, // and ah, 0xf7                 goes to the CPU
        0x0f, 0x30, // wrmsr
    ]);
    for interrupt in [0x08, 0x0c] {
        let (vector, segment) = (interrupt * 4, interrupt * 4 + 2);
        code.address(&[0xc7, 0x06, vector, 0x00], wake); // mov word [vector], wake
        code.op(&[0xc7, 0x06, segment, 0x00, 0x00, 0xf0]); // mov word [segment], 0xf000
    }
    code.op(&[
        0xba, 0xf9, 0x03, 0xb0, 0x01,
        0xee, // mov dx, 0x3f9; mov al, 1; out dx, al: an interrupt for a received byte
        0xb2, 0xfc, 0xb0, 0x08, 0xee, // mov dl, 0xfc; mov al, 8; out dx, al: let out to the interrupt controller
    ]);
    code.outputs(&[
        (0x11, 0x20), // interrupt controller: initialize, ICW4 follows
        (0x08, 0x21), // first vector
        (0x04, 0x21), // the second controller is at input 2
        (0x01, 0x21), // 8086 mode
        (0xee, 0x21), // mask: only the timer and the serial port
        (0x34, 0x43), // timer channel 0: low and high byte, rate generator
        (0xa9, 0x40), // 1193182 Hz / 1193 = 1 kHz
        (0x04, 0x40),
    ]);
    start
}

/// The loop: a heartbeat, and a command if there is one.
fn beats(code: &mut Code, commands: &[(Task, usize)]) {
    let again = code.op(&[
        0xfb, // sti: takes effect after the next instruction, so no interrupt is missed
        0xf4, // hlt
        0xfa, // cli
        0xb0, BEAT, // mov al, BEAT
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xee, // out dx, al
        0xb2, 0xfd, // mov dl, 0xfd: line status
        0xec, // in al, dx
        0xa8, 0x01, // test al, 1: a byte received?
    ]);
    code.back(JZ, again);
    code.op(&[0xb2, 0xf8, 0xec]); // mov dl, 0xf8; in al, dx
    for &(task, place) in commands {
        code.op(&[0x3c, task.byte(), JNZ, 5]); // cmp al, task; jne past the call and the jump
        code.far(CALL, place);
        code.back(JMP_SHORT, again);
    }
    code.back(JMP_SHORT, again);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_has_the_length_of_a_firmware_and_jumps_to_its_start_at_reset() {
        let image = firmware();
        assert_eq!(image.len(), 64 << 10);
        assert_eq!((image[RESET], &image[RESET + 3..RESET + 5]), (0xea, &[0x00, 0xf0][..]));
        let start = usize::from(u16::from_le_bytes([image[RESET + 1], image[RESET + 2]]));
        assert_eq!(image[start], 0xfa);
    }

    #[test]
    fn the_loop_jumps_back_to_where_interrupts_are_let_in() {
        let image = firmware();
        let halt = image.windows(2).position(|bytes| bytes == [0xfb, 0xf4]).expect("a halt");
        let jump = image[..RESET].iter().rposition(|byte| *byte == JMP_SHORT).expect("a jump");
        let distance = i64::from(i8::from_le_bytes([image[jump + 1]]));
        assert_eq!(i64::try_from(jump).expect("small") + 2 + distance, i64::try_from(halt).expect("small"));
    }

    #[test]
    fn scattered_pieces_do_not_overlap() {
        let mut starts: Vec<u32> =
            (0..SCATTERED_PIECES).map(|number| number.wrapping_mul(SCATTERED_STRIDE) % SCATTERED_SPAN).collect();
        starts.sort_unstable();
        let piece = u32::from(SCATTERED_PAGES) * 4096;
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= piece));
    }

    #[test]
    fn the_sum_is_that_of_all_words() {
        assert_eq!(sum(&[1, 0, 0, 0, 0, 1, 0, 0]), 257);
        assert_eq!(sum(&[0xff; 8]), 0xffff_fffe);
    }
}
