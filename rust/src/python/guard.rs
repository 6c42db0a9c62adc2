//! Which leaves the core may read.
//!
//! The exchange table shows raw bytes and skips every check that torch makes. A leaf that fails
//! one of these goes to the reference with its whole field, and the result and the exception are
//! then torch's own.

use std::sync::atomic::{AtomicU8, Ordering};

use pyo3::exceptions::{PyException, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use super::exchange::{Borrowed, DTypes, Door};
use super::reason::Reason;
use crate::dtype::DType;
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
    current_level: Py<PyString>,
    storage_address: Py<PyString>,
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
            current_level: name("_current_level"),
            storage_address: name("_cdata"),
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

/// Methods of `torch.Tensor` itself: a tensor may have an attribute of the same name, which would
/// run code between borrowing and reading.
struct Methods {
    is_neg: Py<PyAny>,
    is_inference: Py<PyAny>,
    untyped_storage: Py<PyAny>,
    storage_offset: Py<PyAny>,
    view: Py<PyAny>,
    as_strided: Py<PyAny>,
}

impl Methods {
    fn of(tensor_type: &Bound<'_, PyAny>) -> PyResult<Self> {
        let method = |name| tensor_type.getattr(name).map(Bound::unbind);
        Ok(Self {
            is_neg: method("is_neg")?,
            is_inference: method("is_inference")?,
            untyped_storage: method("untyped_storage")?,
            storage_offset: method("storage_offset")?,
            view: method("view")?,
            as_strided: method("as_strided")?,
        })
    }
}

/// A buffer as elements of a type, of which tensors are made.
pub(super) struct Elements<'py> {
    tensor: Bound<'py, PyAny>,
    /// Its first element in the storage, if the tensors are to be views that torch makes.
    viewed_from: Option<usize>,
}

const UNKNOWN: u8 = 0;
const NO: u8 = 1;
const YES: u8 = 2;

/// Whether what [`Torch::reinterpret`] makes is what is expected of it: it is no public function.
fn is_as_expected(reinterpret: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = reinterpret.py();
    let torch = py.import("torch")?;
    // Where tensors have version counters.
    let outside = torch.call_method1("inference_mode", (false,))?;
    outside.call_method0("__enter__")?;
    let found = makes_tensors_of_their_own(&torch, reinterpret);
    outside.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
    found
}

fn makes_tensors_of_their_own(
    torch: &Bound<'_, PyModule>,
    reinterpret: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    let host = PyDict::new(torch.py());
    host.set_item("device", "cpu")?;
    let whole = torch.call_method("arange", (16,), Some(&host))?;
    let buffer = whole.call_method1("narrow", (0, 4, 12))?;
    let made = reinterpret.call1((&buffer, (2, 3), (4, 1), 2))?;
    let right = whole.call_method1("as_strided", ((2, 3), (4, 1), 6))?;
    if !made.get_type().is(torch.getattr("Tensor")?) || !made.getattr("_base")?.is_none() {
        return Ok(false);
    }
    for question in ["data_ptr", "stride", "storage_offset", "size", "tolist"] {
        if !made.call_method0(question)?.eq(right.call_method0(question)?)? {
            return Ok(false);
        }
    }
    made.call_method0("zero_")?;
    Ok(made.getattr("_version")?.eq(1)? && whole.getattr("_version")?.eq(0)?)
}

/// What the guard compares with, looked up once.
pub(super) struct Torch {
    pub(super) names: Names,
    methods: Methods,
    /// `(tensor, sizes, strides, elements after its first)`: a tensor over the same storage that
    /// is no view and has a version counter of its own, as if it had memory of its own. It checks
    /// nothing. What torch's compiler puts into the code that it writes:
    /// <https://github.com/pytorch/pytorch/blob/main/torch/csrc/inductor/inductor_ops.h>
    reinterpret: Option<Py<PyAny>>,
    /// Whether it does that here. No lock, which a forked child could find taken.
    is_as_expected: AtomicU8,
    dtypes: DTypes,
    pub(super) mapping_type: Py<PyAny>,
    interpreter_stack: Option<Py<PyAny>>,
    pub(super) tensor_type: Py<PyAny>,
    pub(super) cpu: Py<PyAny>,
    pub(super) device_type: Py<PyAny>,
    uint8: Py<PyAny>,
    int8: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    is_inference_mode_enabled: Py<PyAny>,
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
        let compiler = private.getattr("_dynamo").and_then(|module| module.getattr("guards"));
        let reinterpret = compiler.and_then(|module| module.getattr("_reinterpret_tensor")).ok();
        Ok(Self {
            names: Names::new(py),
            methods: Methods::of(&torch.getattr("Tensor")?)?,
            reinterpret: reinterpret.map(Bound::unbind),
            is_as_expected: AtomicU8::new(UNKNOWN),
            dtypes: DTypes::of(torch),
            mapping_type: py.import("collections.abc")?.getattr("Mapping")?.unbind(),
            interpreter_stack: peek.map(Bound::unbind),
            tensor_type: torch.getattr("Tensor")?.unbind(),
            cpu: device_type.call1(("cpu",))?.unbind(),
            device_type: device_type.unbind(),
            uint8: torch.getattr("uint8")?.unbind(),
            int8: torch.getattr("int8")?.unbind(),
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            is_inference_mode_enabled: torch.getattr("is_inference_mode_enabled")?.unbind(),
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

    /// A view over all that lies in memory from the first leaf to the last; `None` if they are not
    /// of one storage, or if the view would differ from a fresh tensor in more than its memory.
    ///
    /// # Errors
    ///
    /// torch's own, for one if the view does not lie in the storage.
    pub(super) fn view_over<'py>(
        &self,
        first: &Bound<'py, PyAny>,
        last: &Bound<'py, PyAny>,
        sizes: &[i64],
        strides: &[i64],
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = first.py();
        let Methods { is_inference, untyped_storage, as_strided, .. } = &self.methods;
        let storage = |leaf| -> PyResult<u64> {
            let storage = untyped_storage.bind(py).call1((leaf,))?;
            storage.getattr(self.names.storage_address.bind(py))?.extract()
        };
        // What lies between two tensors of one storage is that storage's memory, too.
        if storage(first)? != storage(last)? {
            return Ok(None);
        }
        // A view would require a gradient as well, in no_grad too.
        if first.getattr(self.names.requires_grad.bind(py))?.is_truthy()? {
            return Ok(None);
        }
        // Outside inference mode, a fresh tensor is no inference tensor.
        if is_inference.bind(py).call1((first,))?.is_truthy()?
            && !self.is_inference_mode_enabled.bind(py).call0()?.is_truthy()?
        {
            return Ok(None);
        }
        let (sizes, strides) = (PyTuple::new(py, sizes)?, PyTuple::new(py, strides)?);
        as_strided.bind(py).call1((first, sizes, strides)).map(Some)
    }

    /// Tries the private way to tensors, once. To be called before the first is made, and under no
    /// mode that would see it.
    pub(super) fn prepare_to_carve(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_as_expected.load(Ordering::Relaxed) != UNKNOWN {
            return Ok(());
        }
        let as_expected = match &self.reinterpret {
            None => false,
            Some(reinterpret) => match is_as_expected(reinterpret.bind(py)) {
                // As from a version of torch with other arguments.
                Err(error) if error.is_instance_of::<PyException>(py) => false,
                found => found?,
            },
        };
        self.is_as_expected.store(if as_expected { YES } else { NO }, Ordering::Relaxed);
        Ok(())
    }

    /// A buffer of bytes as elements of a type. `simple`: see [`Borrowed::is_of_simple_device`].
    pub(super) fn elements<'py>(
        &self,
        bytes: &Bound<'py, PyAny>,
        dtype: DType,
        simple: bool,
    ) -> PyResult<Elements<'py>> {
        let py = bytes.py();
        let Methods { view, storage_offset, .. } = &self.methods;
        let tensor = view.bind(py).call1((bytes, self.dtypes.object(py, dtype)?))?;
        let as_expected = self.is_as_expected.load(Ordering::Relaxed) == YES;
        let viewed_from = if simple && as_expected {
            None
        } else {
            Some(storage_offset.bind(py).call1((&tensor,))?.extract()?)
        };
        Ok(Elements { tensor, viewed_from })
    }

    /// A dense tensor of some sizes in a buffer, `start` elements after its first, where it has
    /// room; with a version counter of its own.
    pub(super) fn dense_in<'py>(
        &self,
        buffer: &Elements<'py>,
        sizes: &[i64],
        start: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Elements { tensor, viewed_from } = buffer;
        let py = tensor.py();
        let strides = shape::contiguous_strides(sizes)
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let (sizes, strides) = (PyTuple::new(py, sizes)?, PyTuple::new(py, &strides)?);
        match (viewed_from, &self.reinterpret) {
            (None, Some(reinterpret)) => {
                reinterpret.bind(py).call1((tensor, sizes, strides, start))
            }
            (first, _) => {
                let start = first.unwrap_or(0) + start;
                let as_strided = self.methods.as_strided.bind(py);
                let view = as_strided.call1((tensor, sizes, strides, start))?;
                view.getattr(self.names.data.bind(py))
            }
        }
    }

    /// Whether a mode is active that wants to see torch's operations (fake tensors, tracing,
    /// logging, forward-mode gradients …). The context of `torch.device(…)` and
    /// `set_default_device` is none of these: it changes factories that name no device.
    pub(super) fn is_observed(&self, py: Python<'_>) -> PyResult<bool> {
        if self.calls_are_observed(py)? || self.is_tracing.bind(py).call0()?.is_truthy()? {
            return Ok(true);
        }
        let level = self.forward_ad.bind(py).getattr(self.names.current_level.bind(py))?;
        if level.extract::<i64>()? >= 0 {
            return Ok(true);
        }
        // A transform of torch.func (grad, vmap, functionalize …) is running.
        match &self.interpreter_stack {
            Some(peek) => Ok(!peek.bind(py).call0()?.is_none()),
            None => Ok(false),
        }
    }

    /// Whether one of those modes sees which of torch's functions are called: all that concerns a
    /// batch of views that torch itself makes.
    pub(super) fn calls_are_observed(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.dispatch_modes.bind(py).call0()?.is_truthy()?
            || (self.function_modes.bind(py).call0()?.is_truthy()?
                && !self.only_device_contexts.bind(py).call0()?.is_truthy()?))
    }
}

/// Borrows `tensor`, if the core may read it.
pub(super) fn readable<'a>(
    door: &Door,
    torch: &Torch,
    tensor: Tensor<'a, '_>,
    grad_enabled: bool,
) -> PyResult<Result<Borrowed<'a>, Reason>> {
    match door.borrow(tensor) {
        Some(borrowed) => check(door, torch, tensor, borrowed, grad_enabled),
        None => Ok(Err(Reason::NoPlainData)),
    }
}

/// Whether [`check`] asks nothing of the tensor itself: every other leaf on the host that has data
/// and the same dtype, sizes and strides then passes if this one did.
pub(super) fn layout_decides(door: &Door, borrowed: &Borrowed<'_>, grad_enabled: bool) -> bool {
    let dtype = borrowed.dtype();
    let asks_dtype = dtype.may_hide_shell_dtype() && door.has_table();
    let asks_gradient = dtype.is_floating() && grad_enabled;
    let numel = shape::element_count(borrowed.sizes());
    !asks_dtype && !asks_gradient && numel.is_ok_and(|numel| !may_be_negated(borrowed, numel))
}

/// A lazily negated tensor that torch's public operations make is the imaginary part of a
/// conjugated one. Its stride is 2, so of the contiguous tensors only those of at most one element
/// can be such; asking each leaf would cost more than all the rest.
fn may_be_negated(borrowed: &Borrowed<'_>, numel: usize) -> bool {
    (numel <= 1 && borrowed.dtype().is_floating())
        || !shape::is_contiguous(borrowed.sizes(), borrowed.strides())
}

/// What was borrowed of `tensor`, if the core may read it.
pub(super) fn check<'a>(
    door: &Door,
    torch: &Torch,
    tensor: Tensor<'a, '_>,
    borrowed: Borrowed<'a>,
    grad_enabled: bool,
) -> PyResult<Result<Borrowed<'a>, Reason>> {
    let leaf = tensor.object();
    let py = leaf.py();
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
    if !may_be_negated(&borrowed, numel) {
        return Ok(Ok(borrowed));
    }
    if torch.methods.is_neg.bind(py).call1((leaf,))?.is_truthy()? {
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
