//! Offsets and numbers of clusters that cannot be mixed up.

use std::fmt;
use std::ops::{Add, AddAssign, Range, Sub, SubAssign};

use limosa_page::to_usize;

/// Arithmetic of all positions: a distance is added, and the difference of two is a distance.
macro_rules! position {
    ($name:ident, $distance:ty, $number:ident => $plain:expr) => {
        impl Add<$distance> for $name {
            type Output = Self;

            fn add(self, $number: $distance) -> Self {
                Self(self.0 + $plain)
            }
        }

        impl AddAssign<$distance> for $name {
            fn add_assign(&mut self, $number: $distance) {
                self.0 += $plain;
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

/// Arithmetic of offsets; `unit` is a power of two.
macro_rules! offset {
    ($name:ident) => {
        position!($name, u64, bytes => bytes);

        impl Sub for $name {
            type Output = u64;

            fn sub(self, other: Self) -> u64 {
                self.0 - other.0
            }
        }

        impl $name {
            /// The beginning of the unit that it is in.
            pub(crate) const fn align_down(self, unit: u64) -> Self {
                Self(self.0 & !(unit - 1))
            }

            /// Bytes from the beginning of the unit that it is in.
            pub(crate) const fn within(self, unit: u64) -> u64 {
                self.0 & (unit - 1)
            }

            pub(crate) const fn saturating_add(self, length: u64) -> Self {
                Self(self.0.saturating_add(length))
            }

            pub(crate) fn checked_add(self, length: u64) -> Option<Self> {
                self.0.checked_add(length).map(Self)
            }
        }
    };
}

/// Bytes from the beginning of the disk that the guest sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestOffset(pub u64);

/// Bytes from the beginning of the storage of an image or of its contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostOffset(pub u64);

/// The number of a cluster of an image's file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct HostCluster(pub(crate) u64);

/// Clusters, counted. A length without a type of its own is in bytes, everywhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClusterCount(pub(crate) u64);

/// The difference between guest and host offsets, for bytes that are contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shift(u64);

offset!(GuestOffset);
offset!(HostOffset);
position!(HostCluster, ClusterCount, clusters => clusters.0);

impl Sub for HostCluster {
    type Output = ClusterCount;

    fn sub(self, other: Self) -> ClusterCount {
        ClusterCount(self.0 - other.0)
    }
}

impl Add for ClusterCount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for ClusterCount {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for ClusterCount {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl SubAssign for ClusterCount {
    fn sub_assign(&mut self, other: Self) {
        self.0 -= other.0;
    }
}

impl ClusterCount {
    pub(crate) const NONE: Self = Self(0);
    pub(crate) const ONE: Self = Self(1);

    /// Bytes of these clusters.
    pub(crate) const fn bytes(self, cluster_bits: u32) -> u64 {
        self.0 << cluster_bits
    }

    /// As an index or a capacity.
    pub(crate) const fn as_usize(self) -> usize {
        to_usize(self.0)
    }
}

impl GuestOffset {
    /// The place of the same byte in an external data file, which has contents where the guest sees them.
    pub(crate) const fn in_data_file(self) -> HostOffset {
        HostOffset(self.0)
    }

    /// Itself, or the beginning of the next unit.
    pub(crate) const fn align_up(self, unit: u64) -> Self {
        Self(self.0.next_multiple_of(unit))
    }

    /// As [`Self::align_up`].
    pub(crate) fn checked_align_up(self, unit: u64) -> Option<Self> {
        self.0.checked_next_multiple_of(unit).map(Self)
    }
}

impl HostOffset {
    /// The first cluster that is behind all bytes before it.
    pub(crate) const fn cluster_end(self, cluster_bits: u32) -> HostCluster {
        HostCluster(self.0.div_ceil(1 << cluster_bits))
    }

    /// The cluster that it is in.
    pub(crate) const fn cluster(self, cluster_bits: u32) -> HostCluster {
        HostCluster(self.0 >> cluster_bits)
    }
}

impl HostCluster {
    /// The offset of its first byte.
    pub(crate) const fn begin(self, cluster_bits: u32) -> HostOffset {
        HostOffset(self.0 << cluster_bits)
    }
}

impl Shift {
    /// The shift that leads from `guest` to `host`.
    pub(crate) const fn between(guest: GuestOffset, host: HostOffset) -> Self {
        Self(host.0.wrapping_sub(guest.0))
    }

    /// The host offset of `guest`.
    pub(crate) const fn host(self, guest: GuestOffset) -> HostOffset {
        HostOffset(guest.0.wrapping_add(self.0))
    }

    /// Whether both sides are alike within units of this size, a power of two.
    pub(crate) const fn is_aligned(self, unit: u64) -> bool {
        self.0 & (unit - 1) == 0
    }
}

/// Bytes of a range.
pub(crate) fn length<T: Copy + PartialOrd + Sub<Output = u64>>(range: &Range<T>) -> u64 {
    if range.start < range.end { range.end - range.start } else { 0 }
}
