"""Output of llama-batched-bench and llama-bench (build 0c1e570), and what people read it with."""

from __future__ import annotations

import re

# llama-batched-bench -c 2048 -b 512 -ub 512 -npp 64 -ntg 16 -npl 1,2,4 -t 2
BATCHED_TABLE = """
llama_batched_bench: n_kv_max = 2048, n_batch = 512, n_ubatch = 512, flash_attn = -1, is_pp_shared = 0, is_tg_separate = 0, n_gpu_layers = -1, n_threads = 2, n_threads_batch = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|    64 |     16 |    1 |     80 |    0.039 |  1641.66 |    0.015 |  1072.67 |    0.054 |  1484.20 |
|    64 |     16 |    2 |    160 |    0.028 |  4618.10 |    0.019 |  1687.50 |    0.047 |  3427.59 |
|    64 |     16 |    4 |    320 |    0.053 |  4813.93 |    0.029 |  2177.31 |    0.083 |  3875.36 |

"""  # noqa: E501
# With -pps -kvu: a shared prompt.
SHARED_ROWS = """\
|    64 |     16 |    2 |     96 |    0.013 |  5093.51 |    0.020 |  1600.64 |    0.033 |  2948.67 |
|    64 |     16 |    4 |    128 |    0.013 |  5117.13 |    0.029 |  2244.20 |    0.041 |  3120.05 |
"""
BATCHED_JSON = (
    '{"n_kv_max": 2048, "n_batch": 512, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, '
    '"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 64, "tg": 16, "pl": 2, '
    '"n_kv": 160, "t_pp": 0.027094, "speed_pp": 4724.293457, "t_tg": 0.020118, '
    '"speed_tg": 1590.615356, "t": 0.047212, "speed": 3388.968994}'
)
BATCHED_ROW = re.compile(
    r"^\|\s*(\d+) \|\s*(\d+) \|\s*(\d+) \|\s*(\d+) "
    r"\|\s*([\d.]+) \|\s*([\d.]+) \|\s*([\d.]+) \|\s*([\d.]+) \|\s*([\d.]+) \|\s*([\d.]+) \|$",
    re.MULTILINE,
)
BATCHED_SETTINGS = re.compile(r"n_kv_max = (\d+), n_batch = (\d+), n_ubatch = (\d+)")

SPEED_TABLE = """\
| model                          |       size |     params | backend    | threads |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | ------: | --------------: | -------------------: |
| qwen4exp ?B NVFP4              |  15.14 MiB |    25.88 M | CPU        |       2 |            pp64 |      5279.56 ± 76.24 |
| qwen4exp ?B NVFP4              |  15.14 MiB |    25.88 M | CPU        |       2 |            tg16 |      1137.64 ± 34.69 |

build: 0c1e570 (1)
"""  # noqa: E501
# -b 32,64 -ub 32 -d 0,64 -pg 32,8
SPEED_TABLE_BATCH = """\
| model                          |       size |     params | backend    | threads | n_batch | n_ubatch |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | ------: | ------: | -------: | --------------: | -------------------: |
| qwen4exp ?B NVFP4              |  15.14 MiB |    25.88 M | CPU        |       1 |      32 |       32 |  pp32+tg8 @ d64 |      2657.68 ± 41.25 |
"""  # noqa: E501
# A larger file.
SPEED_ROW_GIB = (
    "| qwen4exp ?B NVFP4              |   6.10 GiB |    10.50 B | CPU        |       2 |"
    "     tg16 @ d256 |         10.09 ± 0.53 |\n"
)
SPEED_ROW = re.compile(
    r"^\| (.+?)\s+\|\s+([\d.]+) ([MG]iB) \|\s+([\d.]+) ([MB]) \| (\S+)\s+\|(?:\s+\w+ \|)+"
    r"\s+((?:pp\d+|tg\d+|pp\d+\+tg\d+)(?: @ d\d+)?) \|\s+([\d.]+) ± ([\d.]+) \|$",
    re.MULTILINE,
)
BUILD = re.compile(r"^build: (\S+) \((\d+)\)$", re.MULTILINE)

# Their stddev_ns, in whole numbers, is 357352; the exact one is written here.
_HEAD = (
    '"build_commit": "0c1e570", "build_number": 1, "cpu_info": "Intel(R) Xeon(R) Processor", '
    '"gpu_info": "", "backends": "CPU", "model_filename": "tiny-nvfp4.gguf", '
    '"model_type": "qwen4exp ?B NVFP4", "model_size": 15876576, "model_n_params": 25876152, '
    '"n_batch": 2048, "n_ubatch": 512, "n_threads": 2, "cpu_mask": "0x0", "cpu_strict": false, '
    '"poll": 50, "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "n_cpu_moe": 0, '
    '"split_mode": "layer", "main_gpu": 0, "no_kv_offload": false, "flash_attn": -1, '
    '"devices": "auto", "tensor_split": "0.00", "tensor_buft_overrides": "none", '
    '"load_mode": "auto", "lazy_mode": "auto", "embeddings": false, "no_op_offload": 0, '
    '"no_host": false, "repack": true, "fit_target": 0, "fit_min_ctx": 0, '
)
SPEED_JSON_LINES = (
    "{" + _HEAD + '"n_prompt": 64, "n_gen": 0, "n_depth": 0, '
    '"test_time": "2026-11-30T00:28:51Z", "avg_ns": 11036057, "stddev_ns": 357337, '
    '"avg_ts": 5803.221020, "stddev_ts": 187.585987, '
    '"samples_ns": [ 11401255, 11019780, 10687137 ],'
    '"samples_ts": [ 5613.42, 5807.74, 5988.51 ]}\n'
)
SPEED_JSON = """\
[
  {
    "build_commit": "0c1e570",
    "build_number": 1,
    "cpu_info": "Intel(R) Xeon(R) Processor",
    "gpu_info": "",
    "backends": "CPU",
    "model_filename": "tiny-nvfp4.gguf",
    "model_type": "qwen4exp ?B NVFP4",
    "model_size": 15876576,
    "model_n_params": 25876152,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 2,
    "cpu_mask": "0x0",
    "cpu_strict": false,
    "poll": 50,
    "type_k": "f16",
    "type_v": "f16",
    "n_gpu_layers": -1,
    "n_cpu_moe": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "no_kv_offload": false,
    "flash_attn": -1,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "auto",
    "lazy_mode": "auto",
    "embeddings": false,
    "no_op_offload": 0,
    "no_host": false,
    "repack": true,
    "fit_target": 0,
    "fit_min_ctx": 0,
    "n_prompt": 16,
    "n_gen": 0,
    "n_depth": 0,
    "test_time": "2026-11-30T00:28:56Z",
    "avg_ns": 3853464,
    "stddev_ns": 0,
    "avg_ts": 4152.108337,
    "stddev_ts": 0.000000,
    "samples_ns": [ 3853464 ],
    "samples_ts": [ 4152.11 ]
  },
  {
    "build_commit": "0c1e570",
    "build_number": 1,
    "cpu_info": "Intel(R) Xeon(R) Processor",
    "gpu_info": "",
    "backends": "CPU",
    "model_filename": "tiny-nvfp4.gguf",
    "model_type": "qwen4exp ?B NVFP4",
    "model_size": 15876576,
    "model_n_params": 25876152,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 2,
    "cpu_mask": "0x0",
    "cpu_strict": false,
    "poll": 50,
    "type_k": "f16",
    "type_v": "f16",
    "n_gpu_layers": -1,
    "n_cpu_moe": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "no_kv_offload": false,
    "flash_attn": -1,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "auto",
    "lazy_mode": "auto",
    "embeddings": false,
    "no_op_offload": 0,
    "no_host": false,
    "repack": true,
    "fit_target": 0,
    "fit_min_ctx": 0,
    "n_prompt": 0,
    "n_gen": 4,
    "n_depth": 0,
    "test_time": "2026-11-30T00:28:56Z",
    "avg_ns": 3936145,
    "stddev_ns": 0,
    "avg_ts": 1016.222726,
    "stddev_ts": 0.000000,
    "samples_ns": [ 3936145 ],
    "samples_ts": [ 1016.22 ]
  }
]
"""
NAMES = (
    "build_commit,build_number,cpu_info,gpu_info,backends,model_filename,model_type,model_size,"
    "model_n_params,n_batch,n_ubatch,n_threads,cpu_mask,cpu_strict,poll,type_k,type_v,"
    "n_gpu_layers,n_cpu_moe,split_mode,main_gpu,no_kv_offload,flash_attn,devices,tensor_split,"
    "tensor_buft_overrides,load_mode,lazy_mode,embeddings,no_op_offload,no_host,repack,fit_target,"
    "fit_min_ctx,n_prompt,n_gen,n_depth,test_time,avg_ns,stddev_ns,avg_ts,stddev_ts\n"
)
_VALUES = (
    "0c1e570 1 Intel(R)_Xeon(R)_Processor  CPU tiny-nvfp4.gguf qwen4exp_?B_NVFP4 15876576 "
    "25876152 2048 512 2 0x0 0 50 f16 f16 -1 0 layer 0 0 -1 auto 0.00 none auto auto 0 0 0 1 0 0 "
    "64 0 0 2026-11-30T00:28:51Z 11036057 357337 5803.221020 187.585987"
)
"""Of csv and sql, for the record of SPEED_JSON_LINES."""
VALUES = [value.replace("_", " ") for value in _VALUES.split(" ")]
SQL_TABLE = """\
CREATE TABLE IF NOT EXISTS llama_bench (
  build_commit TEXT,
  build_number INTEGER,
  cpu_info TEXT,
  gpu_info TEXT,
  backends TEXT,
  model_filename TEXT,
  model_type TEXT,
  model_size INTEGER,
  model_n_params INTEGER,
  n_batch INTEGER,
  n_ubatch INTEGER,
  n_threads INTEGER,
  cpu_mask TEXT,
  cpu_strict INTEGER,
  poll INTEGER,
  type_k TEXT,
  type_v TEXT,
  n_gpu_layers INTEGER,
  n_cpu_moe INTEGER,
  split_mode TEXT,
  main_gpu INTEGER,
  no_kv_offload INTEGER,
  flash_attn INTEGER,
  devices TEXT,
  tensor_split TEXT,
  tensor_buft_overrides TEXT,
  load_mode TEXT,
  lazy_mode TEXT,
  embeddings INTEGER,
  no_op_offload INTEGER,
  no_host INTEGER,
  repack INTEGER,
  fit_target INTEGER,
  fit_min_ctx INTEGER,
  n_prompt INTEGER,
  n_gen INTEGER,
  n_depth INTEGER,
  test_time TEXT,
  avg_ns INTEGER,
  stddev_ns INTEGER,
  avg_ts REAL,
  stddev_ts REAL
);

"""
