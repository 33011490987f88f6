//! What a page of a VM's memory is: numbers, ranges, bitmaps, zero detection, holes.
