//! Builder methods of options, which grow without breaking their users.

/// A method for each field, which sets it.
macro_rules! setters {
    ($options:ident { $($field:ident: $value:ty),* $(,)? }) => {
        impl $options {
            $(
                #[doc = concat!("Sets the field `", stringify!($field), "`.")]
                #[must_use]
                pub fn $field(mut self, $field: $value) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

pub(crate) use setters;
