//! The first bytes of conversations over NBD.

/// Returns what an honest client sends up to the first request, by a form of headers; or nothing, so that the fuzzer's
/// bytes are a whole conversation.
pub fn agreement(how: u8) -> Vec<u8> {
    let option = |option: u32, data: &[u8]| {
        let length = u32::try_from(data.len()).unwrap_or(0);
        [&b"IHAVEOPT"[..], &option.to_be_bytes(), &length.to_be_bytes(), data].concat()
    };
    let mut contexts = [&[0; 4][..], &2_u32.to_be_bytes()].concat();
    for name in ["base:allocation", "qemu:allocation-depth"] {
        contexts.extend_from_slice(&u32::try_from(name.len()).unwrap_or(0).to_be_bytes());
        contexts.extend_from_slice(name.as_bytes());
    }
    let headers = match how % 4 {
        0 => return Vec::new(),
        1 => None,
        2 => Some(8),
        _ => Some(11),
    };
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    if let Some(headers) = headers {
        bytes.extend_from_slice(&option(headers, b""));
        bytes.extend_from_slice(&option(10, &contexts));
    }
    bytes.extend_from_slice(&option(7, &[0; 6]));
    bytes
}

/// Returns seeds: every command with headers of each form, and a whole handshake.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![[&[0][..], &agreement(3)].concat()];
    for how in 1..4 {
        let mut bytes = vec![how];
        for (cookie, command) in (1_u64..).zip([1_u16, 0, 6, 4, 5, 7, 3, 0, 2]) {
            let extended = how == 3;
            let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
            let flags: u16 = if extended && command == 1 { 1 << 5 } else { 0 };
            let length: u64 = if matches!(command, 2 | 3) { 0 } else { 4096 + 512 };
            bytes.extend_from_slice(&magic.to_be_bytes());
            bytes.extend_from_slice(&flags.to_be_bytes());
            bytes.extend_from_slice(&command.to_be_bytes());
            bytes.extend_from_slice(&cookie.to_be_bytes());
            bytes.extend_from_slice(&(cookie * 2048).to_be_bytes());
            bytes.extend_from_slice(&length.to_be_bytes()[if extended { 0 } else { 4 }..]);
            if command == 1 {
                bytes.extend_from_slice(&[7; 4096 + 512]);
            }
        }
        seeds.push(bytes);
    }
    seeds
}
