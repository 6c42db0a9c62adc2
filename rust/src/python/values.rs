//! Values that are handed through: scalars, tensors that stay where they are, lists of such.

use pyo3::exceptions::PyRecursionError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat, PyInt, PyList, PyString, PyTuple};

use super::guard::Torch;
use super::reason::Reason;

/// Lists deeper than this go to the reference: one that holds itself would never end.
pub(super) const MAX_DEPTH: usize = 16;

/// Values that no rule of the reference looks into: it passes them on as they are.
pub(super) fn is_scalar(value: &Bound<'_, PyAny>) -> bool {
    value.is_none()
        || value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyFloat>()
        || value.is_exact_instance_of::<PyBool>()
        || value.is_exact_instance_of::<PyString>()
        || value.is_exact_instance_of::<PyBytes>()
}

/// Whether the value is a list or a tuple, and of no subclass.
pub(super) fn is_list(value: &Bound<'_, PyAny>) -> bool {
    value.is_exact_instance_of::<PyList>() || value.is_exact_instance_of::<PyTuple>()
}

/// The reference's rule for values that need no computing.
///
/// Where nothing moves it passes every value on. Else it maps tensors, of which those on the host
/// stay the same objects if the batch goes there, and rebuilds every list on its way.
#[derive(Clone, Copy)]
pub(super) struct Through<'a> {
    pub(super) torch: &'a Torch,
    pub(super) to: To,
}

/// Where values go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    /// They stay where they are.
    Nowhere,
    /// To the host.
    Cpu,
    /// To a device: no tensor passes.
    Device,
}

impl Through<'_> {
    /// Whether a scalar or tensor passes as the same object.
    pub(super) fn passes(self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        if !self.torch.is_tensor(value) {
            return Ok(is_scalar(value));
        }
        match self.to {
            To::Nowhere => Ok(true),
            To::Cpu => value.getattr(self.torch.names.is_cpu.bind(value.py()))?.is_truthy(),
            To::Device => Ok(false),
        }
    }

    /// Whether [`Self::pass`] gives the reference's result, lists included.
    pub(super) fn passes_nested(self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.passes_at(value, 0)
    }

    /// Why a value does not pass.
    pub(super) fn why_not(self, value: &Bound<'_, PyAny>) -> Reason {
        if self.torch.is_tensor(value) {
            Reason::NotOnCpu
        } else if is_list(value) {
            Reason::Nested
        } else {
            Reason::NotATensor
        }
    }

    fn passes_at(self, value: &Bound<'_, PyAny>, depth: usize) -> PyResult<bool> {
        if !is_list(value) {
            return self.passes(value);
        }
        if self.to == To::Nowhere {
            return Ok(true);
        }
        if depth == MAX_DEPTH {
            return Ok(false);
        }
        for inner in value.try_iter()? {
            if !self.passes_at(&inner?, depth + 1)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The value as the reference passes it on.
    pub(super) fn pass<'py>(self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.pass_at(value, 0)
    }

    fn pass_at<'py>(self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<Bound<'py, PyAny>> {
        if self.to == To::Nowhere || !is_list(value) {
            return Ok(value.clone());
        }
        // It was less deep when `passes_nested` looked; another thread has changed it since.
        if depth > MAX_DEPTH {
            return Err(PyRecursionError::new_err("maximum recursion depth exceeded"));
        }
        let inner = value.try_iter()?.map(|inner| self.pass_at(&inner?, depth + 1));
        let inner = inner.collect::<PyResult<Vec<_>>>()?;
        if value.is_exact_instance_of::<PyList>() {
            Ok(PyList::new(value.py(), inner)?.into_any())
        } else {
            Ok(PyTuple::new(value.py(), inner)?.into_any())
        }
    }
}
