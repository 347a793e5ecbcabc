"""The dtype table against torch and against DLPack as torch writes it."""

import ctypes

import pytest
import torch

from support.checkpoints import BITS
from tensorlift.format.dtypes import ALL, BY_CODE


class _DLType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h as far as the shape."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    ]


EXPRESSIBLE = [dtype for dtype in ALL if dtype.torch_name is not None]


def test_the_table_has_every_dtype_of_the_format_once():
    assert {dtype.code: dtype.bits for dtype in ALL} == dict(BITS)
    assert [dtype.id for dtype in ALL] == list(range(len(ALL)))
    assert {code: dtype.code for code, dtype in BY_CODE.items()} == {code: code for code in BITS}


def test_only_f6_has_no_torch_dtype():
    assert {dtype.code for dtype in ALL if dtype.torch_name is None} == {"F6_E2M3", "F6_E3M2"}


@pytest.mark.parametrize("dtype", EXPRESSIBLE, ids=lambda dtype: dtype.code)
def test_torch_and_dlpack_agree(dtype):
    tensor = torch.zeros(16, dtype=torch.uint8).view(getattr(torch, dtype.torch_name))
    assert tensor.dtype.itemsize * 8 == dtype.bits * dtype.elements
    assert tensor.dtype.itemsize == dtype.alignment
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    described = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    assert (described.dtype.code, described.dtype.bits, described.dtype.lanes) == dtype.dl
    assert described.shape[0] == 16 // tensor.dtype.itemsize
    back = torch.utils.dlpack.from_dlpack(capsule)
    assert back.dtype == tensor.dtype
    assert back.data_ptr() == tensor.data_ptr()
