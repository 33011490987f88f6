//! The guest: firmware of a few dozen bytes that sends a heartbeat to the serial port a thousand times a second.
//!
//! It sleeps between two heartbeats, so that it costs the host next to nothing, and wakes by a timer interrupt, which
//! needs its memory: the vector and the stack are in page 0, its code is in the firmware's own RAM block.

/// Bytes of the firmware's image; QEMU takes multiples of 64 KiB.
const LEN: usize = 0x1_0000;
/// Where the CPU starts (with 20 address bits: `f000:fff0`).
const RESET: usize = 0xfff0;

/// The byte of a heartbeat on the serial port.
pub(crate) const BEAT: u8 = b'.';

/// The image for QEMU's `-bios`.
pub(crate) fn firmware() -> Vec<u8> {
    // 16-bit code at f000:0000.
    let mut code = vec![
        0xfa, // cli
        0x31, 0xc0, // xor ax, ax
        0x8e, 0xd8, // mov ds, ax
        0x8e, 0xd0, // mov ss, ax
        0xbc, 0x00, 0x10, // mov sp, 0x1000
    ];
    code.extend([
        0x66, 0xb9, 0x1b, 0x00, 0x00, 0x00, // mov ecx, 0x1b: the local APIC off,
        0x0f, 0x32, // rdmsr                              so that the timer's interrupt
        0x80, 0xe4, 0xf7, // and ah, 0xf7                 goes to the CPU
        0x0f, 0x30, // wrmsr
    ]);
    let (vector, segment) = (0x08 * 4, 0x08 * 4 + 2);
    code.extend([0xc7, 0x06, vector, 0x00]); // mov word [vector], tick
    let tick_at = code.len();
    code.extend([0, 0]);
    code.extend([0xc7, 0x06, segment, 0x00, 0x00, 0xf0]); // mov word [segment], 0xf000
    for (value, port) in [
        (0x11, 0x20), // interrupt controller: initialize, ICW4 follows
        (0x08, 0x21), // first vector
        (0x04, 0x21), // the second controller is at input 2
        (0x01, 0x21), // 8086 mode
        (0xfe, 0x21), // mask: only the timer
        (0x34, 0x43), // timer channel 0: low and high byte, rate generator
        (0xa9, 0x40), // 1193182 Hz / 1193 = 1 kHz
        (0x04, 0x40),
    ] {
        code.extend([0xb0, value, 0xe6, port]); // mov al, value; out port, al
    }
    code.extend([
        0xfb, // sti: takes effect after the next instruction, so no tick is missed
        0xf4, // hlt
        0xb0, BEAT, // mov al, BEAT
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xee, // out dx, al
        0xeb, 0xf6, // jmp to sti
    ]);
    let tick = u16::try_from(code.len()).unwrap_or(0).to_le_bytes();
    code.extend([
        0x50, // push ax
        0xb0, 0x20, // mov al, 0x20: end of interrupt
        0xe6, 0x20, // out 0x20, al
        0x58, // pop ax
        0xcf, // iret
    ]);
    let mut image = code;
    image.splice(tick_at..tick_at + 2, tick);
    image.resize(RESET, 0xf4);
    image.extend([0xea, 0x00, 0x00, 0x00, 0xf0]); // jmp f000:0000
    image.resize(LEN, 0xf4);
    image
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_has_the_length_of_a_firmware_and_jumps_to_its_begin_at_reset() {
        let image = firmware();
        assert_eq!(image.len(), 64 << 10);
        assert_eq!(image[RESET..RESET + 5], [0xea, 0x00, 0x00, 0x00, 0xf0]);
        assert_eq!(image[0], 0xfa);
    }

    #[test]
    fn the_loop_jumps_back_to_where_interrupts_are_let_in() {
        let image = firmware();
        let jump = image.windows(2).position(|bytes| bytes == [0xeb, 0xf6]).expect("a jump");
        assert_eq!(image[jump + 2 - 10], 0xfb);
    }
}
