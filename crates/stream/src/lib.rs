//! QEMU's migration format without I/O: sections, RAM records, commands, return path, mapped-ram layout.
