//! Every method of zero detection, against what a look at each byte says.
#![allow(unsafe_code, reason = "maps memory between unreadable pages, which no safe call can name")]

use std::ptr;

use limosa_page::{
    GuestPages, PAGE_LEN, PageKind, Scan, UnknownZeroMethod, ZeroMethod, is_zero, is_zero_at, is_zero_with,
};
use proptest::prelude::*;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Ends the test on a machine where it would test less than it says.
fn methods() -> Vec<ZeroMethod> {
    let methods: Vec<_> = ZeroMethod::available().collect();
    assert!(methods.contains(&ZeroMethod::Portable));
    if cfg!(target_arch = "x86_64") {
        assert!(methods.contains(&ZeroMethod::Sse2), "every x86-64 has SSE2");
    }
    if cfg!(target_arch = "aarch64") {
        assert!(methods.contains(&ZeroMethod::Neon), "every 64-bit Arm on Linux has NEON");
    }
    methods
}

/// Calls `check` with every alignment to 64 bytes of `len` zero bytes between bytes that are not zero.
fn at_every_alignment(len: usize, mut check: impl FnMut(&mut [u8])) {
    let mut buffer = vec![0xffu8; len + 3 * 64];
    let aligned = buffer.as_ptr().align_offset(64);
    for alignment in 64..128 {
        buffer.fill(0xff);
        let bytes = &mut buffer[aligned + alignment..][..len];
        bytes.fill(0);
        check(bytes);
    }
}

#[test]
fn one_byte_that_is_not_zero_is_found_wherever_it_is_in_memory_of_any_length_and_alignment() {
    for method in methods() {
        for len in (0..160).chain([255, 256, 257, 287, 300, 511, 513]) {
            at_every_alignment(len, |bytes| {
                assert!(is_zero_with(method, bytes), "{method}: {len} zeros at {:p}", bytes.as_ptr());
                for at in 0..len {
                    bytes[at] = 1;
                    assert!(!is_zero_with(method, bytes), "{method}: byte {at} of {len} at {:p}", bytes.as_ptr());
                    bytes[at] = 0;
                }
            });
        }
    }
}

#[test]
fn one_byte_that_is_not_zero_is_found_wherever_it_is_in_a_page() {
    for method in methods() {
        at_every_alignment(PAGE_LEN, |bytes| {
            assert!(is_zero_with(method, bytes));
            for at in 0..PAGE_LEN {
                bytes[at] = 0x80;
                assert!(!is_zero_with(method, bytes), "{method}: byte {at} at {:p}", bytes.as_ptr());
                bytes[at] = 0;
            }
        });
    }
}

#[test]
fn every_value_of_a_byte_but_zero_is_found() {
    for method in methods() {
        let mut page = vec![0; PAGE_LEN];
        for (at, value) in (0..PAGE_LEN).step_by(37).flat_map(|at| (1..=255).map(move |value| (at, value))) {
            page[at] = value;
            assert!(!is_zero_with(method, &page), "{method}: {value} in byte {at}");
            page[at] = 0;
        }
    }
}

/// Between two unreadable pages, a read before or behind the memory named ends the test by SIGSEGV.
#[test]
fn not_a_byte_outside_is_read() {
    let readable = 2 * PAGE_LEN;
    // SAFETY: a new mapping of anonymous memory; nothing else is there.
    let map = unsafe {
        mmap_anonymous(ptr::null_mut(), readable + 2 * PAGE_LEN, ProtFlags::empty(), MapFlags::PRIVATE).unwrap()
    };
    let start = map.cast::<u8>().wrapping_add(PAGE_LEN);
    // SAFETY: the middle of the mapping just made.
    unsafe { mprotect(start.cast(), readable, MprotectFlags::READ).unwrap() };
    for method in methods() {
        for len in (0..200).chain(readable - 70..=readable) {
            // SAFETY: the pages at `start` are readable until they are unmapped below, and they cannot be written.
            let (front, back) = unsafe {
                (std::slice::from_raw_parts(start, len), std::slice::from_raw_parts(start.add(readable - len), len))
            };
            assert!(is_zero_with(method, front) && is_zero_with(method, back), "{method}: {len} bytes");
            // SAFETY: as above.
            assert!(unsafe { is_zero_at(back.as_ptr(), len) });
            for bytes in [front, back] {
                let pages = GuestPages::from(bytes);
                let runs = Scan::new(pages, pages.pages(), method).map(|run| (run.kind, run.pages.len()));
                let whole = len.div_ceil(PAGE_LEN) as u64;
                assert!(runs.eq((len > 0).then_some((PageKind::Zero, whole))), "{method}: {len} bytes in runs");
            }
        }
    }
    // SAFETY: the whole mapping made above, which nothing refers to any more.
    unsafe { munmap(map, readable + 2 * PAGE_LEN).unwrap() };
}

#[test]
fn a_method_is_known_by_its_name_and_by_no_other() {
    for method in ZeroMethod::ALL {
        assert_eq!(method.to_string().parse(), Ok(method));
    }
    let error = "AVX512".parse::<ZeroMethod>().unwrap_err();
    assert_eq!(error, UnknownZeroMethod { name: "AVX512".to_owned() });
    assert_eq!(error.to_string(), "zero detection \"AVX512\": expected plain, portable, neon, sse2, avx2 or avx512");
}

#[test]
fn the_best_method_is_available_and_the_last_one_unless_the_processor_is_better_without_avx512() {
    let best = ZeroMethod::best();
    let without = ZeroMethod::available().rfind(|method| *method != ZeroMethod::Avx512);
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let wide = processor.contains("AuthenticAMD") && ZeroMethod::Avx512.is_available();
    assert_eq!(Some(best), if wide { Some(ZeroMethod::Avx512) } else { without });
    assert_eq!(ZeroMethod::default(), ZeroMethod::best());
}

proptest! {
    #[test]
    fn all_methods_agree_with_a_look_at_each_byte(
        mut bytes in proptest::collection::vec(prop_oneof![99 => Just(0u8), 1 => any::<u8>()], 0..9000),
        clear_from in 0usize..9000,
        skip in 0usize..64,
    ) {
        if let Some(rest) = bytes.get_mut(clear_from..) {
            rest.fill(0);
        }
        for part in [&bytes[..], bytes.get(skip..).unwrap_or(&[]), bytes.get(clear_from..).unwrap_or(&[])] {
            let expected = part.iter().all(|byte| *byte == 0);
            prop_assert_eq!(is_zero(part), expected);
            for method in ZeroMethod::ALL {
                // Also those that this processor lacks: they fall back.
                prop_assert_eq!(is_zero_with(method, part), expected, "{}", method);
            }
        }
    }
}
