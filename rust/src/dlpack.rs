//! The DLPack 1.3 ABI: tensors as C structs, and the table through which torch exchanges them.
//!
//! Written by hand from the specification (<https://dmlc.github.io/dlpack/latest/c_api.html>); the
//! sizes and offsets are checked when this file compiles. Pointers to Python objects are plain
//! `c_void` here, so that this file needs no Python.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of};

use crate::dtype::DType;

/// `kDLCPU`. Pinned tensors say this too: torch never produces `kDLCUDAHost`.
pub const DEVICE_CPU: i32 = 1;
/// `kDLCUDA`.
pub const DEVICE_CUDA: i32 = 2;
/// `kDLROCM`.
pub const DEVICE_ROCM: i32 = 10;
/// `kDLOneAPI`, torch's XPU.
pub const DEVICE_ONE_API: i32 = 14;

/// The major version whose structs are below.
pub const MAJOR_VERSION: u32 = 1;

/// Version of a struct's layout; another major number is another layout.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

/// Where a tensor's bytes lie.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Device {
    pub device_type: i32,
    pub device_id: i32,
}

/// A tensor, borrowed: `shape` and `strides` belong to whoever filled the struct.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Tensor {
    pub data: *mut c_void,
    pub device: Device,
    pub ndim: i32,
    pub dtype: DType,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// A tensor with an owner: `deleter` gives it back.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct ManagedTensorVersioned {
    pub version: Version,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut ManagedTensorVersioned)>,
    pub flags: u64,
    pub tensor: Tensor,
}

/// First part of every version of the table.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct ExchangeHeader {
    pub version: Version,
    pub prev: *const ExchangeHeader,
}

/// `managed_tensor_to_py_object_no_sync`: steals the tensor, returns a new reference; -1 with a
/// Python exception set if it fails (torch then does *not* call the deleter).
pub type ToPyObject = unsafe extern "C" fn(*mut ManagedTensorVersioned, *mut *mut c_void) -> c_int;

/// `dltensor_from_py_object_no_sync`: fills a borrowed tensor; -1 with a Python exception set if
/// it fails.
pub type BorrowFromPyObject = unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int;

/// The table behind `torch.Tensor.__dlpack_c_exchange_api__` (torch 2.10 on). It lives as long as
/// the process.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct ExchangeApi {
    pub header: ExchangeHeader,
    pub allocate: Option<
        unsafe extern "C" fn(
            *mut Tensor,
            *mut *mut ManagedTensorVersioned,
            *mut c_void,
            Option<unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char)>,
        ) -> c_int,
    >,
    pub from_py_object:
        Option<unsafe extern "C" fn(*mut c_void, *mut *mut ManagedTensorVersioned) -> c_int>,
    pub to_py_object: Option<ToPyObject>,
    pub borrow_from_py_object: Option<BorrowFromPyObject>,
    pub current_work_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

const _: () = {
    assert!(size_of::<DType>() == 4);
    assert!(size_of::<Device>() == 8);
    assert!(size_of::<Tensor>() == 48);
    assert!(offset_of!(Tensor, dtype) == 20);
    assert!(offset_of!(Tensor, shape) == 24);
    assert!(offset_of!(Tensor, byte_offset) == 40);
    assert!(size_of::<ManagedTensorVersioned>() == 80);
    assert!(offset_of!(ManagedTensorVersioned, tensor) == 32);
    assert!(size_of::<ExchangeApi>() == 56);
    assert!(offset_of!(ExchangeApi, to_py_object) == 32);
};
