//! Talking to people (stderr) and to programs (stdout).
//!
//! Law: a job does not fail because nobody listens. A terminal that has hung up or a pipe that was closed loses words, not
//! VMs; `println!` would panic.

/// A line for people.
macro_rules! say {
    ($($words:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stderr().lock(), format_args!("{}\n", format_args!($($words)*)));
    }};
}

/// A line of what was asked for.
macro_rules! print_out {
    () => { print_out!("") };
    ($($words:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stdout().lock(), format_args!("{}\n", format_args!($($words)*)));
    }};
}

pub(crate) use {print_out, say};
