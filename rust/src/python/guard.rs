//! Which leaves the core may read.
//!
//! The exchange table shows raw bytes and skips every check that torch makes. A leaf that fails
//! one of these goes to the reference with its whole field, and the result and the exception are
//! then torch's own.

use pyo3::intern;
use pyo3::prelude::*;

use super::exchange::{Borrowed, Door};
use super::reason::Reason;
use crate::shape;

/// What the guard compares with, looked up once.
pub(super) struct Torch {
    pub(super) tensor_type: Py<PyAny>,
    pub(super) cpu: Py<PyAny>,
    pub(super) device_type: Py<PyAny>,
    uint8: Py<PyAny>,
    int8: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    dispatch_modes: Py<PyAny>,
    function_modes: Py<PyAny>,
    only_device_contexts: Py<PyAny>,
    forward_ad: Py<PyAny>,
}

impl Torch {
    pub(super) fn new(
        torch: &Bound<'_, PyModule>,
        only_device_contexts: Py<PyAny>,
    ) -> PyResult<Self> {
        let private = torch.getattr("_C")?;
        let device_type = torch.getattr("device")?;
        Ok(Self {
            tensor_type: torch.getattr("Tensor")?.unbind(),
            cpu: device_type.call1(("cpu",))?.unbind(),
            device_type: device_type.unbind(),
            uint8: torch.getattr("uint8")?.unbind(),
            int8: torch.getattr("int8")?.unbind(),
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            dispatch_modes: private.getattr("_len_torch_dispatch_stack")?.unbind(),
            function_modes: private.getattr("_len_torch_function_stack")?.unbind(),
            only_device_contexts,
            forward_ad: torch.py().import("torch.autograd.forward_ad")?.into_any().unbind(),
        })
    }

    /// Whether `object` is a `torch.Tensor` and of no subclass.
    pub(super) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type_ptr().cast() == self.tensor_type.as_ptr()
    }

    pub(super) fn is_grad_enabled(&self, py: Python<'_>) -> PyResult<bool> {
        self.is_grad_enabled.bind(py).call0()?.is_truthy()
    }

    /// Whether a mode is active that wants to see torch's operations (fake tensors, tracing,
    /// logging, forward-mode gradients …). The context of `torch.device(…)` and
    /// `set_default_device` is none of these: it changes factories that name no device.
    pub(super) fn is_observed(&self, py: Python<'_>) -> PyResult<bool> {
        if self.dispatch_modes.bind(py).call0()?.is_truthy()? {
            return Ok(true);
        }
        let level = self.forward_ad.bind(py).getattr(intern!(py, "_current_level"))?;
        if level.extract::<i64>()? >= 0 {
            return Ok(true);
        }
        Ok(self.function_modes.bind(py).call0()?.is_truthy()?
            && !self.only_device_contexts.bind(py).call0()?.is_truthy()?)
    }
}

/// Borrows `leaf`, a tensor that is a `torch.Tensor` exactly, if the core may read it.
pub(super) fn readable<'a>(
    door: &Door,
    torch: &Torch,
    leaf: &'a Bound<'_, PyAny>,
    grad_enabled: bool,
) -> PyResult<Result<Borrowed<'a>, Reason>> {
    let py = leaf.py();
    let Some(borrowed) = door.borrow(leaf) else {
        return Ok(Err(Reason::NoPlainData));
    };
    if !borrowed.on_cpu() {
        return Ok(Err(Reason::NotOnCpu));
    }
    let dtype = borrowed.dtype();
    if dtype.item_size().is_none() {
        return Ok(Err(Reason::Dtype));
    }
    if dtype.may_hide_shell_dtype() && door.has_table() {
        let named = leaf.getattr(intern!(py, "dtype"))?;
        if !named.is(&torch.uint8) && !named.is(&torch.int8) {
            return Ok(Err(Reason::Dtype));
        }
    }
    let Ok(numel) = shape::element_count(borrowed.sizes()) else {
        return Ok(Err(Reason::TooLarge));
    };
    if numel > 0 && borrowed.data().is_null() {
        return Ok(Err(Reason::NoPlainData));
    }
    if grad_enabled
        && dtype.is_floating()
        && leaf.getattr(intern!(py, "requires_grad"))?.is_truthy()?
    {
        return Ok(Err(Reason::RequiresGrad));
    }
    // A lazily negated tensor that torch's public operations make is the imaginary part of a
    // conjugated one. Its stride is 2, so of the contiguous tensors only those of at most one
    // element can be such; asking each leaf would cost more than all the rest.
    let may_be_negated = (numel <= 1 && dtype.is_floating())
        || !shape::is_contiguous(borrowed.sizes(), borrowed.strides());
    if may_be_negated && leaf.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        return Ok(Err(Reason::Negated));
    }
    Ok(Ok(borrowed))
}
