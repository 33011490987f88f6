//! Fields of tables: big-endian numbers at offsets.

/// Bytes of a table; what lies behind their end is zero.
#[derive(Debug, Clone, Copy)]
pub(in crate::qcow2) struct Fields<'a>(pub(in crate::qcow2) &'a [u8]);

impl Fields<'_> {
    pub(in crate::qcow2) fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0.get(at..).and_then(|bytes| bytes.first_chunk()).copied().unwrap_or([0; N])
    }

    pub(in crate::qcow2) fn u8(&self, at: usize) -> u8 {
        let [byte] = self.array(at);
        byte
    }

    pub(in crate::qcow2) fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.array(at))
    }

    pub(in crate::qcow2) fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.array(at))
    }

    pub(in crate::qcow2) fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.array(at))
    }
}
