//! The code of the vCPUs: 133 bytes of 32-bit code, flat and without paging, at guest address 0.
//!
//! A vCPU asks for leave by reading a port; the answer is how many pages it may write next. So it pauses only at
//! the beginning of its loop, and its registers say how far it has come:
//!
//! | register | is |
//! |---|---|
//! | `ebp` | where its parameters are |
//! | `esi` | page of its share that is next, from 0 |
//! | `edx` | generation that this page will have |
//! | `esp` | pages of leave that are left (there is no stack) |
//! | `eax`, `ebx`, `ecx` | scratch |
//!
//! Parameters of vCPU `n` are in the same page, 16 bytes each from [`PARAMETERS`] on: first page, pages, stride, and
//! the seed. Neither they nor the code are ever written.

use limosa_page::PAGE_LEN;

use crate::guest::pattern::{Plan, Share};

/// The port that is read for leave.
pub(super) const PORT: u16 = 0x10;

/// Every 128th word of a page is written: 8 stores.
pub(super) const SPACING: usize = 128;

/// Where the parameters begin.
pub(super) const PARAMETERS: usize = 0x800;

/// The code, as an assembler makes it.
const CODE: [u8; 133] = [
    // ask:
    0xe5, 0x10, //                         in   eax, 0x10
    0x85, 0xc0, //                         test eax, eax
    0x74, 0xfa, //                         jz   ask
    0x89, 0xc4, //                         mov  esp, eax
    // page:
    0x8b, 0x4d, 0x00, //                   mov  ecx, [ebp]             first page
    0x01, 0xf1, //                         add  ecx, esi
    0x8d, 0x04, 0x11, //                   lea  eax, [ecx + edx]
    0xa8, 0x0f, //                         test al, 15
    0x74, 0x18, //                         jz   zero
    0x69, 0xc1, 0xb1, 0x79, 0x37, 0x9e, // imul eax, ecx, 0x9e3779b1
    0x69, 0xda, 0x6b, 0xca, 0xeb, 0x85, // imul ebx, edx, 0x85ebca6b
    0x01, 0xd8, //                         add  eax, ebx
    0x03, 0x45, 0x0c, //                   add  eax, [ebp + 12]        seed
    0xbb, 0x80, 0x1a, 0x57, 0x59, //       mov  ebx, 0x59571a80        128 * 0xc2b2ae35
    0xeb, 0x04, //                         jmp  store
    // zero:
    0x31, 0xc0, //                         xor  eax, eax
    0x31, 0xdb, //                         xor  ebx, ebx
    // store:
    0xc1, 0xe1, 0x0c, //                   shl  ecx, 12
    0x89, 0x01, //                         mov  [ecx], eax
    0x01, 0xd8, //                         add  eax, ebx
    0x89, 0x81, 0x00, 0x02, 0x00, 0x00, // mov  [ecx + 0x200], eax
    0x01, 0xd8, //                         add  eax, ebx
    0x89, 0x81, 0x00, 0x04, 0x00, 0x00, // mov  [ecx + 0x400], eax
    0x01, 0xd8, //                         add  eax, ebx
    0x89, 0x81, 0x00, 0x06, 0x00, 0x00, // mov  [ecx + 0x600], eax
    0x01, 0xd8, //                         add  eax, ebx
    0x89, 0x81, 0x00, 0x08, 0x00, 0x00, // mov  [ecx + 0x800], eax
    0x01, 0xd8, //                         add  eax, ebx
    0x89, 0x81, 0x00, 0x0a, 0x00, 0x00, // mov  [ecx + 0xa00], eax
    0x01, 0xd8, //                         add  eax, ebx
    0x89, 0x81, 0x00, 0x0c, 0x00, 0x00, // mov  [ecx + 0xc00], eax
    0x01, 0xd8, //                         add  eax, ebx
    0x89, 0x81, 0x00, 0x0e, 0x00, 0x00, // mov  [ecx + 0xe00], eax
    0x03, 0x75, 0x08, //                   add  esi, [ebp + 8]         stride
    0x3b, 0x75, 0x04, //                   cmp  esi, [ebp + 4]         pages
    0x72, 0x03, //                         jb   within
    0x2b, 0x75, 0x04, //                   sub  esi, [ebp + 4]
    // within:
    0x85, 0xf6, //                         test esi, esi
    0x75, 0x01, //                         jnz  lap
    0x42, //                               inc  edx                    a lap is over
    // lap:
    0x4c, //                               dec  esp
    0x75, 0x88, //                         jnz  page
    0xe9, 0x7b, 0xff, 0xff, 0xff, //       jmp  ask
];

/// The guest's first page.
pub(super) fn image(plan: &Plan) -> [u8; PAGE_LEN] {
    let mut image = [0; PAGE_LEN];
    let words = plan.shares.iter().flat_map(|share| parameters(share, plan.seed));
    let bytes = words.flat_map(u32::to_le_bytes);
    image.iter_mut().skip(PARAMETERS).zip(bytes).for_each(|(place, byte)| *place = byte);
    image.iter_mut().zip(CODE).for_each(|(place, byte)| *place = byte);
    image
}

#[allow(clippy::cast_possible_truncation, reason = "the guest has less than 2^20 pages")]
fn parameters(share: &Share, seed: u32) -> [u32; 4] {
    [share.first as u32, share.pages as u32, share.stride as u32, seed]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::pattern::{Contents, Layout};

    #[test]
    fn the_numbers_in_the_code_are_those_of_the_pattern() {
        let number = |at: usize| u32::from_le_bytes(*CODE[at..].first_chunk().unwrap());
        let base = |page, generation| Contents::of(0, page, generation, SPACING).word(0);
        assert_eq!(number(0x16), base(1, 0));
        assert_eq!(number(0x1c), base(0, 1));
        let contents = Contents::of(0, 1, 1, SPACING);
        assert_eq!(number(0x26), contents.word(SPACING).wrapping_sub(contents.word(0)));
    }

    #[test]
    fn parameters_of_64_vcpus_fit_behind_the_code() {
        let plan = Plan::new(9, Layout { reserved: 1, filled: 0, working: 64 }, SPACING, 64);
        let image = image(&plan);
        assert_eq!(image[..CODE.len()], CODE);
        assert!(CODE.len() < PARAMETERS);
        assert_eq!(image[PARAMETERS + 16 * 63..][..16], [64, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0]);
    }
}
