//! Terminal output that the programs of limosa share.
//!
//! [`parse`] reads sizes, rates and times from the command line, [`quantity`] writes them for people, [`say!`] and
//! [`print_out!`] print lines for people (standard error) and for programs (standard output), [`named_values`] is an
//! option with named values, and [`exit_on_signal`] cleans up when a signal ends the program.
//!
//! # Example
//!
//! ```
//! use limosa_console::{parse, quantity};
//!
//! assert_eq!(parse::size("64M"), Ok(64 << 20));
//! assert_eq!(quantity::bytes(3 << 29), "1.5 GiB");
//! ```

mod ending;
mod named;
pub mod parse;
mod print;
pub mod quantity;

pub use ending::exit_on_signal;
pub use named::{named_values, on_off_parser};
pub use print::{anyhow_error_line, check_stdout, error_line, print_line, say_line};
