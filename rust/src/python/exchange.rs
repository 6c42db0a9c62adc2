//! Reading tensors from torch, and giving it tensors made here.
//!
//! torch 2.10 and later publish DLPack's C exchange table: about 40 ns to read a tensor, with no
//! link to libtorch. It skips every check that `Tensor.__dlpack__` makes, so [`super::guard`]
//! makes them. Where there is no table, [`Door::Attributes`] reads the same through Python
//! attributes, some six times slower.
use std::marker::PhantomData;
use std::ptr;
use std::slice;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use super::guard::Tensor;
use crate::dlpack;
use crate::dtype::{DType, code};
use crate::plan::Output;
use crate::shape::{self, Dims};
use crate::source::{Layouts, SourcePtr};

/// How tensors are read and made.
pub(super) enum Door {
    /// Through DLPack's exchange table.
    Table(Table),
    /// Through Python attributes: torch below 2.10.
    Attributes(Attributes),
}

/// The two functions of the exchange table that are used here.
pub(super) struct Table {
    borrow: dlpack::BorrowFromPyObject,
    pub(super) to_py_object: dlpack::ToPyObject,
}

/// What the slower door needs of torch.
pub(super) struct Attributes {
    empty: Py<PyAny>,
    /// Methods of `torch.Tensor` itself: a tensor may have an attribute of the same name.
    data_ptr: Py<PyAny>,
    stride: Py<PyAny>,
    /// Only torch below 2.10, where this door is used, has named tensors.
    has_names: Option<Py<PyAny>>,
    strided: Py<PyAny>,
    dtypes: DTypes,
}

/// torch's objects for the element types that the core takes.
pub(super) struct DTypes(Vec<(Py<PyAny>, DType)>);

impl DTypes {
    pub(super) fn of(torch: &Bound<'_, PyModule>) -> Self {
        let names = [
            ("bool", DType::new(code::BOOL, 8)),
            ("uint8", DType::new(code::UINT, 8)),
            ("int8", DType::new(code::INT, 8)),
            ("int16", DType::new(code::INT, 16)),
            ("int32", DType::new(code::INT, 32)),
            ("int64", DType::new(code::INT, 64)),
            ("uint16", DType::new(code::UINT, 16)),
            ("uint32", DType::new(code::UINT, 32)),
            ("uint64", DType::new(code::UINT, 64)),
            ("float16", DType::new(code::FLOAT, 16)),
            ("float32", DType::new(code::FLOAT, 32)),
            ("float64", DType::new(code::FLOAT, 64)),
            ("bfloat16", DType::new(code::BFLOAT, 16)),
            ("float8_e4m3fn", DType::new(code::FLOAT8_E4M3FN, 8)),
            ("float8_e4m3fnuz", DType::new(code::FLOAT8_E4M3FNUZ, 8)),
            ("float8_e5m2", DType::new(code::FLOAT8_E5M2, 8)),
            ("float8_e5m2fnuz", DType::new(code::FLOAT8_E5M2FNUZ, 8)),
        ];
        let known = names.iter().filter_map(|&(name, dtype)| {
            torch.getattr(name).ok().map(|object| (object.unbind(), dtype))
        });
        Self(known.collect())
    }

    fn find(&self, object: &Bound<'_, PyAny>) -> Option<DType> {
        self.0.iter().find(|(known, _)| object.is(known)).map(|&(_, dtype)| dtype)
    }

    /// torch's object for an element type.
    pub(super) fn object<'py>(
        &self,
        py: Python<'py>,
        dtype: DType,
    ) -> PyResult<&Bound<'py, PyAny>> {
        let found = self.0.iter().find(|&&(_, known)| known == dtype);
        found
            .map(|(object, _)| object.bind(py))
            .ok_or_else(|| PyRuntimeError::new_err("mmcollate: unknown dtype"))
    }
}

/// A tensor as it was when it was borrowed. Its sizes and strides may point into the tensor
/// itself, so it must be used before anything can resize it: while it is in use, no Python code
/// runs and the interpreter lock is held.
pub(super) struct Borrowed<'a> {
    data: *const u8,
    dtype: DType,
    /// DLPack's number, or [`OTHER_DEVICE`].
    device_type: i32,
    extents: Extents<'a>,
}

/// None that the slower door knows.
const OTHER_DEVICE: i32 = 0;

enum Extents<'a> {
    InTensor {
        ndim: usize,
        sizes: *const i64,
        strides: *const i64,
        _leaf: PhantomData<&'a ()>,
    },
    /// Boxed, to keep what the other door returns small.
    Copied(Box<(Dims, Dims)>),
}

impl Borrowed<'_> {
    /// Address of the first element; null if the tensor has none, or no data of its own.
    pub(super) fn data(&self) -> *const u8 {
        self.data
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn on_cpu(&self) -> bool {
        self.device_type == dlpack::DEVICE_CPU
    }

    /// Whether it is on the host, CUDA, ROCm or XPU, where a tensor is no more than a storage, sizes,
    /// strides and an offset.
    pub(super) fn is_of_simple_device(&self) -> bool {
        let plain =
            [dlpack::DEVICE_CPU, dlpack::DEVICE_CUDA, dlpack::DEVICE_ROCM, dlpack::DEVICE_ONE_API];
        plain.contains(&self.device_type)
    }

    pub(super) fn sizes(&self) -> &[i64] {
        match &self.extents {
            // SAFETY: filled by torch for a tensor that `'a` keeps alive; see the type's note.
            Extents::InTensor { ndim, sizes, .. } => unsafe { view(*sizes, *ndim) },
            Extents::Copied(copied) => &copied.0,
        }
    }

    pub(super) fn strides(&self) -> &[i64] {
        match &self.extents {
            // SAFETY: as for the sizes.
            Extents::InTensor { ndim, strides, .. } => unsafe { view(*strides, *ndim) },
            Extents::Copied(copied) => &copied.1,
        }
    }
}

impl<'a> Borrowed<'a> {
    /// Whether two tensors on the host have the same type, sizes and bytes; `None` where bytes
    /// can't tell (floating point, gaps, no plain data).
    pub(super) fn same_whole_numbers(&self, other: &Self) -> Option<bool> {
        let plain = |leaf: &Self| {
            leaf.on_cpu()
                && !leaf.dtype.is_floating()
                // A bool's byte may be any but 0 for true.
                && leaf.dtype.code != code::BOOL
                && !leaf.dtype.may_hide_shell_dtype()
                && shape::is_contiguous(leaf.sizes(), leaf.strides())
        };
        let item_size = self.dtype.item_size()?;
        if self.dtype != other.dtype || !plain(self) || !plain(other) {
            return None;
        }
        if self.sizes() != other.sizes() {
            return Some(false);
        }
        let nbytes = shape::byte_count(self.sizes(), item_size).ok()?;
        if nbytes > 0 && (self.data.is_null() || other.data.is_null()) {
            return None;
        }
        let (left, right) = (self.source(), other.source());
        // SAFETY: both are contiguous, of `nbytes` bytes, and alive while they are borrowed. A
        // kernel of torch that writes to them on another thread makes the answer meaningless, as
        // it would `torch.equal`'s, and nothing worse.
        Some(unsafe { left.same_bytes(right, nbytes) })
    }

    /// The leaf alone, if the core takes its dtype.
    pub(super) fn layouts(&self) -> Option<Layouts> {
        let item_size = self.dtype.item_size()?;
        Some(Layouts::new(self.dtype, item_size, self.sizes(), self.strides()))
    }

    pub(super) fn source(&self) -> SourcePtr {
        // SAFETY: every holder of the pointer carries `'a`, for which the leaf is alive (`Leaves`,
        // and what is planned from it). Its bytes are where they are until the gather has run:
        // between the two no Python code runs that could resize it, and for other threads see the
        // note in `source.rs`.
        unsafe { SourcePtr::new(self.data) }
    }
}

/// Leaves of one field, of one dtype, that the core may read; alive for `'a`.
pub(super) struct Leaves<'a> {
    pub(super) layouts: Layouts,
    sources: Vec<SourcePtr>,
    /// The first leaf's strides, if it is contiguous and others just like it need no check.
    strides: Option<Dims>,
    _alive: PhantomData<&'a ()>,
}

impl<'a> Leaves<'a> {
    /// Starts with the first leaf; `None` if the core doesn't take its dtype. `layout_decides` says
    /// whether others just like it need no check.
    pub(super) fn start(
        first: &Borrowed<'a>,
        capacity: usize,
        layout_decides: bool,
    ) -> Option<Self> {
        let layouts = first.layouts()?;
        let mut sources = Vec::with_capacity(capacity);
        sources.push(first.source());
        let simple = layout_decides && layouts.all_contiguous();
        let strides = simple.then(|| Dims::from_slice(first.strides()));
        Some(Self { layouts, sources, strides, _alive: PhantomData })
    }

    /// Adds a leaf that was not checked, if it is just like the first; returns whether. Of
    /// metadata nearly all are, and this costs a third of checking and adding each.
    pub(super) fn push_alike(&mut self, leaf: &Borrowed<'a>) -> bool {
        let Some(strides) = &self.strides else { return false };
        let alike = leaf.dtype == self.layouts.dtype()
            && leaf.on_cpu()
            && !leaf.data.is_null()
            && self.layouts.push_alike(leaf.sizes(), leaf.strides(), strides);
        if alike {
            self.sources.push(leaf.source());
        }
        alike
    }

    /// Adds a leaf of the same dtype.
    pub(super) fn push(&mut self, leaf: &Borrowed<'a>) {
        debug_assert_eq!(leaf.dtype, self.layouts.dtype());
        self.layouts.push(leaf.sizes(), leaf.strides());
        self.sources.push(leaf.source());
    }

    /// The leaves' layouts and their addresses, in order; these for as long as `'a`.
    pub(super) fn into_parts(self) -> (Layouts, Vec<SourcePtr>) {
        (self.layouts, self.sources)
    }
}

/// # Safety
///
/// `len` values can be read from `start` for as long as `'a`; a null `start` needs `len` 0.
unsafe fn view<'a>(start: *const i64, len: usize) -> &'a [i64] {
    if len == 0 {
        return &[];
    }
    // SAFETY: by the contract above.
    unsafe { slice::from_raw_parts(start, len) }
}

impl Door {
    /// Opens the faster door that this torch has. `skip_table` asks for the slower one.
    pub(super) fn open(torch: &Bound<'_, PyModule>, skip_table: bool) -> PyResult<Self> {
        if !skip_table && let Some(table) = Table::of(torch)? {
            return Ok(Self::Table(table));
        }
        Attributes::of(torch).map(Self::Attributes)
    }

    pub(super) fn has_table(&self) -> bool {
        matches!(self, Self::Table(_))
    }

    /// Reads a tensor. `None` where it has no plain data to show: sparse, quantized, nested, meta …
    pub(super) fn borrow<'a>(&self, leaf: Tensor<'a, '_>) -> Option<Borrowed<'a>> {
        match self {
            Self::Table(table) => table.borrow(leaf),
            Self::Attributes(attributes) => attributes.borrow(leaf.object()).ok().flatten(),
        }
    }
}

impl Table {
    fn of(torch: &Bound<'_, PyModule>) -> PyResult<Option<Self>> {
        let tensor_type = torch.getattr("Tensor")?;
        let Ok(capsule) = tensor_type.getattr("__dlpack_c_exchange_api__") else {
            return Ok(None);
        };
        // Early betas of the table were a plain integer; those are not looked into.
        let Ok(capsule) = capsule.cast_into::<PyCapsule>() else {
            return Ok(None);
        };
        let Ok(api) = capsule.pointer_checked(Some(c"dlpack_exchange_api")) else {
            return Ok(None);
        };
        let mut header = api.as_ptr().cast::<dlpack::ExchangeHeader>().cast_const();
        // A torch with a newer major version offers older tables behind it.
        while !header.is_null() {
            // SAFETY: the capsule's name says that this is a table, which starts with a header
            // and lives as long as the process; `prev` leads to further ones.
            let this = unsafe { &*header };
            if this.version.major == dlpack::MAJOR_VERSION {
                // SAFETY: this major version's table has the layout of `ExchangeApi`.
                let api = unsafe { &*header.cast::<dlpack::ExchangeApi>() };
                return Ok(match (api.borrow_from_py_object, api.to_py_object) {
                    (Some(borrow), Some(to_py_object)) => Some(Self { borrow, to_py_object }),
                    _ => None,
                });
            }
            header = this.prev;
        }
        Ok(None)
    }

    fn borrow<'a>(&self, leaf: Tensor<'a, '_>) -> Option<Borrowed<'a>> {
        let leaf = leaf.object();
        let mut tensor = dlpack::Tensor {
            data: ptr::null_mut(),
            device: dlpack::Device { device_type: 0, device_id: 0 },
            ndim: 0,
            dtype: DType::new(0, 0),
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        // SAFETY: attached to the interpreter (`leaf` is bound); `leaf` is a torch.Tensor, as only
        // such become a `Tensor`, and torch fills the struct or sets an exception.
        let code = unsafe { (self.borrow)(leaf.as_ptr().cast(), &raw mut tensor) };
        if code != 0 {
            drop(PyErr::take(leaf.py()));
            return None;
        }
        let ndim = usize::try_from(tensor.ndim).ok()?;
        if ndim > 0 && (tensor.shape.is_null() || tensor.strides.is_null()) {
            return None;
        }
        let data = tensor.data.cast::<u8>().cast_const();
        let offset = usize::try_from(tensor.byte_offset).ok()?;
        Some(Borrowed {
            data: if data.is_null() { data } else { data.wrapping_add(offset) },
            dtype: tensor.dtype,
            device_type: tensor.device.device_type,
            extents: Extents::InTensor {
                ndim,
                sizes: tensor.shape,
                strides: tensor.strides,
                _leaf: PhantomData,
            },
        })
    }
}

impl Attributes {
    fn of(torch: &Bound<'_, PyModule>) -> PyResult<Self> {
        let tensor_type = torch.getattr("Tensor")?;
        Ok(Self {
            empty: torch.getattr("empty")?.unbind(),
            data_ptr: tensor_type.getattr("data_ptr")?.unbind(),
            stride: tensor_type.getattr("stride")?.unbind(),
            has_names: tensor_type.getattr("has_names").ok().map(Bound::unbind),
            strided: torch.getattr("strided")?.unbind(),
            dtypes: DTypes::of(torch),
        })
    }

    fn borrow<'a>(&self, leaf: &'a Bound<'_, PyAny>) -> PyResult<Option<Borrowed<'a>>> {
        let dtype = leaf.getattr("dtype")?;
        let Some(dtype) = self.dtypes.find(&dtype) else {
            return Ok(None);
        };
        let py = leaf.py();
        if let Some(has_names) = &self.has_names
            && has_names.bind(py).call1((leaf,))?.is_truthy()?
        {
            return Ok(None);
        }
        let strided = leaf.getattr("layout")?.is(&self.strided);
        if !strided || leaf.getattr("is_nested")?.is_truthy()? {
            return Ok(None);
        }
        let mut device_type = OTHER_DEVICE;
        for (name, number) in [
            ("is_cpu", dlpack::DEVICE_CPU),
            ("is_cuda", dlpack::DEVICE_CUDA),
            ("is_xpu", dlpack::DEVICE_ONE_API),
        ] {
            if leaf.getattr(name)?.is_truthy()? {
                device_type = number;
                break;
            }
        }
        let data: usize = self.data_ptr.bind(py).call1((leaf,))?.extract()?;
        let sizes: Vec<i64> = leaf.getattr("shape")?.extract()?;
        let strides: Vec<i64> = self.stride.bind(py).call1((leaf,))?.extract()?;
        Ok(Some(Borrowed {
            data: ptr::with_exposed_provenance(data),
            dtype,
            device_type,
            extents: Extents::Copied(Box::new((Dims::from_vec(sizes), Dims::from_vec(strides)))),
        }))
    }

    /// An uninitialised CPU tensor for `output`, and the address of its bytes.
    pub(super) fn empty<'py>(
        &self,
        py: Python<'py>,
        output: &Output,
    ) -> PyResult<(Bound<'py, PyAny>, *mut u8)> {
        let dtype = self.dtypes.object(py, output.dtype)?;
        let kwargs = PyDict::new(py);
        kwargs.set_item("dtype", dtype)?;
        kwargs.set_item("device", "cpu")?;
        let sizes = PyTuple::new(py, output.sizes.iter())?;
        let tensor = self.empty.bind(py).call((sizes,), Some(&kwargs))?;
        let data: usize = tensor.call_method0("data_ptr")?.extract()?;
        Ok((tensor, ptr::with_exposed_provenance_mut(data)))
    }
}
