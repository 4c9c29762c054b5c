"""Writes small valid GGUF files into a folder, as seeds for fuzz_gguf.

python tests/fuzz/gguf_seeds.py build/seeds
build/fuzz/fuzz_gguf -max_len=4096 -max_total_time=300 build/seeds
"""

import sys
from pathlib import Path

import gguf
import numpy as np


def write_seed(path: Path, quant: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, "test")
    writer.add_uint8("v.u8", 1)
    writer.add_int8("v.i8", -1)
    writer.add_uint16("v.u16", 1)
    writer.add_int16("v.i16", -1)
    writer.add_int32("v.i32", -1)
    writer.add_float32("v.f32", 0.5)
    writer.add_bool("v.bool", True)
    writer.add_uint64("v.u64", 1 << 40)
    writer.add_int64("v.i64", -1)
    writer.add_float64("v.f64", 0.25)
    writer.add_array("v.numbers", [1, 2, 3])
    writer.add_array("v.bools", [True, False])
    writer.add_array("v.strings", ["a", "bc"])
    writer.add_array("v.nested", [[1, 2], [3]])
    writer.add_custom_alignment(64)
    block, size = gguf.GGML_QUANT_SIZES[quant]
    writer.add_tensor("quant.weight", np.zeros((2, size), np.uint8), raw_dtype=quant)
    writer.add_tensor("norm.weight", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("F32", "F16", "BF16", "Q8_0", "NVFP4", "Q4_K", "I8"):
        write_seed(folder / f"{name}.gguf", gguf.GGMLQuantizationType[name])


if __name__ == "__main__":
    main()
