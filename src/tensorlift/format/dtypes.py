"""The dtypes of the safetensors format: the one table that everything else looks them up in."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALL", "BY_CODE", "Dtype"]


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of the format, and how torch and DLPack express it."""

    id: int
    """Index in `ALL`."""
    code: str
    """As in the file: "BF16"."""
    bits: int
    """Of one element of the format."""
    torch_name: str | None
    """Attribute of the torch module; None where torch has no such dtype."""
    elements: int
    """Elements of the format in one element of torch, along the last dimension."""
    dl: tuple[int, int, int]
    """DLPack type code, bits of a lane and lanes, of one element of torch."""

    @property
    def alignment(self) -> int:
        """Bytes to which such a tensor is aligned in memory: the size of one element of torch."""
        return max(1, self.bits * self.elements // 8)


# DLPack type codes: DLDataTypeCode in dlpack.h (version 1.1 and newer for float8 and below).
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_F8_E4M3FN, _F8_E4M3FNUZ, _F8_E5M2, _F8_E5M2FNUZ, _F8_E8M0FNU = 10, 11, 12, 13, 14
_F6_E2M3FN, _F6_E3M2FN, _F4_E2M1FN = 15, 16, 17

# Codes and bits: the format's specification (README and `Dtype` of the safetensors project). F8_E4M3 is the
# finite kind (e4m3fn). A torch element of F4 holds two elements of the format, hence its two lanes.
_ROWS: tuple[tuple[str, int, str | None, int, tuple[int, int, int]], ...] = (
    ("BOOL", 8, "bool", 1, (_BOOL, 8, 1)),
    ("F4", 4, "float4_e2m1fn_x2", 2, (_F4_E2M1FN, 4, 2)),
    ("F6_E2M3", 6, None, 1, (_F6_E2M3FN, 6, 1)),
    ("F6_E3M2", 6, None, 1, (_F6_E3M2FN, 6, 1)),
    ("U8", 8, "uint8", 1, (_UINT, 8, 1)),
    ("I8", 8, "int8", 1, (_INT, 8, 1)),
    ("F8_E5M2", 8, "float8_e5m2", 1, (_F8_E5M2, 8, 1)),
    ("F8_E4M3", 8, "float8_e4m3fn", 1, (_F8_E4M3FN, 8, 1)),
    ("F8_E8M0", 8, "float8_e8m0fnu", 1, (_F8_E8M0FNU, 8, 1)),
    ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", 1, (_F8_E4M3FNUZ, 8, 1)),
    ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", 1, (_F8_E5M2FNUZ, 8, 1)),
    ("I16", 16, "int16", 1, (_INT, 16, 1)),
    ("U16", 16, "uint16", 1, (_UINT, 16, 1)),
    ("F16", 16, "float16", 1, (_FLOAT, 16, 1)),
    ("BF16", 16, "bfloat16", 1, (_BFLOAT, 16, 1)),
    ("I32", 32, "int32", 1, (_INT, 32, 1)),
    ("U32", 32, "uint32", 1, (_UINT, 32, 1)),
    ("F32", 32, "float32", 1, (_FLOAT, 32, 1)),
    ("C64", 64, "complex64", 1, (_COMPLEX, 64, 1)),
    ("F64", 64, "float64", 1, (_FLOAT, 64, 1)),
    ("I64", 64, "int64", 1, (_INT, 64, 1)),
    ("U64", 64, "uint64", 1, (_UINT, 64, 1)),
)

ALL: tuple[Dtype, ...] = tuple(Dtype(i, *row) for i, row in enumerate(_ROWS))
"""Every dtype of the format, by id."""

BY_CODE: dict[str, Dtype] = {dtype.code: dtype for dtype in ALL}
"""The same by the code in the file."""
