//! Which leaves the core may read.
//!
//! The exchange table shows raw bytes and skips every check that torch makes. A leaf that fails
//! one of these goes to the reference with its whole field, and the result and the exception are
//! then torch's own.

use pyo3::prelude::*;
use pyo3::types::PyString;

use super::exchange::{Borrowed, Door};
use super::reason::Reason;
use crate::shape;

/// Names of the attributes that are looked up for each leaf.
///
/// Made with the collator and not by pyo3's `intern!`, whose cells are filled at their first use: a
/// process that forks while another thread fills one leaves a child that waits for ever.
pub(super) struct Names {
    pub(super) data: Py<PyString>,
    pub(super) field: Py<PyString>,
    pub(super) dim: Py<PyString>,
    pub(super) keep_on_cpu: Py<PyString>,
    pub(super) is_cpu: Py<PyString>,
    dtype: Py<PyString>,
    requires_grad: Py<PyString>,
    is_neg: Py<PyString>,
    current_level: Py<PyString>,
}

impl Names {
    fn new(py: Python<'_>) -> Self {
        let name = |text| PyString::intern(py, text).unbind();
        Self {
            data: name("data"),
            field: name("field"),
            dim: name("dim"),
            keep_on_cpu: name("keep_on_cpu"),
            is_cpu: name("is_cpu"),
            dtype: name("dtype"),
            requires_grad: name("requires_grad"),
            is_neg: name("is_neg"),
            current_level: name("_current_level"),
        }
    }
}

/// An object that is a `torch.Tensor` and of no subclass.
#[derive(Clone, Copy)]
pub(super) struct Tensor<'a, 'py>(&'a Bound<'py, PyAny>);

impl<'a, 'py> Tensor<'a, 'py> {
    pub(super) fn object(self) -> &'a Bound<'py, PyAny> {
        self.0
    }
}

/// What the guard compares with, looked up once.
pub(super) struct Torch {
    pub(super) names: Names,
    pub(super) mapping_type: Py<PyAny>,
    interpreter_stack: Option<Py<PyAny>>,
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
    is_tracing: Py<PyAny>,
}

impl Torch {
    pub(super) fn new(
        torch: &Bound<'_, PyModule>,
        only_device_contexts: Py<PyAny>,
    ) -> PyResult<Self> {
        let private = torch.getattr("_C")?;
        let device_type = torch.getattr("device")?;
        let py = torch.py();
        let functorch = private.getattr("_functorch").ok();
        let peek = functorch.and_then(|module| module.getattr("peek_interpreter_stack").ok());
        Ok(Self {
            names: Names::new(py),
            mapping_type: py.import("collections.abc")?.getattr("Mapping")?.unbind(),
            interpreter_stack: peek.map(Bound::unbind),
            tensor_type: torch.getattr("Tensor")?.unbind(),
            cpu: device_type.call1(("cpu",))?.unbind(),
            device_type: device_type.unbind(),
            uint8: torch.getattr("uint8")?.unbind(),
            int8: torch.getattr("int8")?.unbind(),
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            dispatch_modes: private.getattr("_len_torch_dispatch_stack")?.unbind(),
            function_modes: private.getattr("_len_torch_function_stack")?.unbind(),
            only_device_contexts,
            is_tracing: private.getattr("_is_tracing")?.unbind(),
            forward_ad: py.import("torch.autograd.forward_ad")?.into_any().unbind(),
        })
    }

    /// Whether `object` is a `torch.Tensor` and of no subclass.
    pub(super) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type_ptr().cast() == self.tensor_type.as_ptr()
    }

    /// `object`, if it is a `torch.Tensor` and of no subclass.
    pub(super) fn tensor<'a, 'py>(&self, object: &'a Bound<'py, PyAny>) -> Option<Tensor<'a, 'py>> {
        self.is_tensor(object).then_some(Tensor(object))
    }

    pub(super) fn is_grad_enabled(&self, py: Python<'_>) -> PyResult<bool> {
        self.is_grad_enabled.bind(py).call0()?.is_truthy()
    }

    /// Whether a mode is active that wants to see torch's operations (fake tensors, tracing,
    /// logging, forward-mode gradients …). The context of `torch.device(…)` and
    /// `set_default_device` is none of these: it changes factories that name no device.
    pub(super) fn is_observed(&self, py: Python<'_>) -> PyResult<bool> {
        if self.dispatch_modes.bind(py).call0()?.is_truthy()?
            || self.is_tracing.bind(py).call0()?.is_truthy()?
        {
            return Ok(true);
        }
        let level = self.forward_ad.bind(py).getattr(self.names.current_level.bind(py))?;
        if level.extract::<i64>()? >= 0 {
            return Ok(true);
        }
        // A transform of torch.func (grad, vmap, functionalize …) is running.
        if let Some(peek) = &self.interpreter_stack
            && !peek.bind(py).call0()?.is_none()
        {
            return Ok(true);
        }
        Ok(self.function_modes.bind(py).call0()?.is_truthy()?
            && !self.only_device_contexts.bind(py).call0()?.is_truthy()?)
    }
}

/// Borrows `tensor`, if the core may read it.
pub(super) fn readable<'a>(
    door: &Door,
    torch: &Torch,
    tensor: Tensor<'a, '_>,
    grad_enabled: bool,
) -> PyResult<Result<Borrowed<'a>, Reason>> {
    let leaf = tensor.object();
    let py = leaf.py();
    let Some(borrowed) = door.borrow(tensor) else {
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
        let named = leaf.getattr(torch.names.dtype.bind(py))?;
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
        && leaf.getattr(torch.names.requires_grad.bind(py))?.is_truthy()?
    {
        return Ok(Err(Reason::RequiresGrad));
    }
    // A lazily negated tensor that torch's public operations make is the imaginary part of a
    // conjugated one. Its stride is 2, so of the contiguous tensors only those of at most one
    // element can be such; asking each leaf would cost more than all the rest.
    let may_be_negated = (numel <= 1 && dtype.is_floating())
        || !shape::is_contiguous(borrowed.sizes(), borrowed.strides());
    if !may_be_negated {
        return Ok(Ok(borrowed));
    }
    if leaf.call_method0(torch.names.is_neg.bind(py))?.is_truthy()? {
        return Ok(Err(Reason::Negated));
    }
    // `is_neg` gives up the interpreter lock for a moment, in which another thread may resize the
    // tensor; what was borrowed before must not be used after it.
    Ok(match door.borrow(tensor) {
        Some(again) if again.dtype() == dtype && again.on_cpu() => {
            let numel = shape::element_count(again.sizes()).unwrap_or(usize::MAX);
            if numel > 0 && again.data().is_null() { Err(Reason::NoPlainData) } else { Ok(again) }
        }
        _ => Err(Reason::NoPlainData),
    })
}
