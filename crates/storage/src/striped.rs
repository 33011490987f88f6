//! Values that each thread has one of, in a cache line that few others write.
//!
//! Law: what is counted or locked for every request is in stripes. A processor that writes to a cache line takes it
//! from all others, which costs more than the rest of a short request as soon as several cores do it.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicUsize, Ordering};

/// Stripes.
#[cfg(not(loom))]
const STRIPES: usize = 16;
/// Few, so that the model checker comes to an end.
#[cfg(loom)]
const STRIPES: usize = 2;

/// 128 bytes: processors fetch cache lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Line<T>(T);

/// A value for each of a number of threads, in cache lines of its own.
///
/// A thread has the same stripe all its life. Stripes are given out in turn, so threads share some when there have been
/// more of them, even if others have ended. Its value has to be shareable.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// use limosa_storage::Striped;
///
/// let requests = Striped::new(|| AtomicU64::new(0));
/// requests.own().fetch_add(1, Ordering::Relaxed);
/// assert_eq!(requests.iter().map(|stripe| stripe.load(Ordering::Relaxed)).sum::<u64>(), 1);
/// ```
pub struct Striped<T>(Box<[Line<T>; STRIPES]>);

impl<T> Striped<T> {
    /// Stripes with these values.
    pub fn new(mut value: impl FnMut() -> T) -> Self {
        Self(Box::new(std::array::from_fn(|_| Line(value()))))
    }

    /// The value of the thread that asks.
    pub fn own(&self) -> &T {
        let Line(first) = &self.0[0];
        self.0.get(own_number()).map_or(first, |Line(value)| value)
    }

    /// The values of all stripes.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|Line(value)| value)
    }
}

impl<T: Default> Default for Striped<T> {
    fn default() -> Self {
        Self::new(T::default)
    }
}

impl<T: fmt::Debug> fmt::Debug for Striped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A reference to a value that is shared, as [`Arc`] is, whose clones are counted apart from those of others.
///
/// Each stripe of a [`Striped`] has one, and its threads clone and drop that in a cache line of their own.
pub struct StripedArc<T>(Arc<Line<Arc<T>>>);

impl<T> StripedArc<T> {
    /// Another reference, whose clones are counted for themselves.
    pub fn new(value: Arc<T>) -> Self {
        Self(Arc::new(Line(value)))
    }

    /// One for each stripe.
    pub fn striped(value: T) -> Striped<Self> {
        let value = Arc::new(value);
        Striped::new(|| Self::new(Arc::clone(&value)))
    }
}

impl<T> Clone for StripedArc<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Deref for StripedArc<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.0
    }
}

impl<T: fmt::Debug> fmt::Debug for StripedArc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// The number of a thread's stripe: they are given out in turn.
#[cfg(not(loom))]
fn own_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES;
    }
    NUMBER.with(|number| *number)
}

/// By the thread's number in the model. Only its text is the same in every run.
#[cfg(loom)]
fn own_number() -> usize {
    let text = format!("{:?}", loom::thread::current().id());
    text.bytes().filter(u8::is_ascii_digit).map(usize::from).sum::<usize>() % STRIPES
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn threads_that_follow_each_other_have_stripes_of_their_own() {
        let striped = Striped::new(|| AtomicUsize::new(0));
        for _ in 0..STRIPES {
            std::thread::scope(|scope| scope.spawn(|| striped.own().fetch_add(1, Ordering::Relaxed)).join()).unwrap();
        }
        let counts: Vec<_> = striped.iter().map(|stripe| stripe.load(Ordering::Relaxed)).collect();
        assert_eq!(counts.iter().sum::<usize>(), STRIPES);
        // Threads of other tests may have taken some numbers in between.
        assert!(counts.iter().filter(|count| **count > 0).count() > STRIPES / 2, "{counts:?}");
    }

    #[test]
    fn stripes_are_in_cache_lines_of_their_own() {
        let striped = Striped::<u8>::default();
        let addresses: Vec<_> = striped.iter().map(|stripe| std::ptr::from_ref(stripe).addr()).collect();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= 128 && pair[0] % 128 == 0));
    }
}
