//! What limosa bench runs: contestants, interleaved rounds, reports.
