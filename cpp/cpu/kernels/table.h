// Fills the kernel table from the code above; each instruction set's file includes this once.
#pragma once

#include "cpp/cpu/kernels/attention.h"
#include "cpp/cpu/kernels/decode.h"
#include "cpp/cpu/kernels/delta.h"
#include "cpp/cpu/kernels/elementwise.h"
#include "cpp/cpu/kernels/gemm.h"
#include "cpp/cpu/kernels/kernels.h"

#define IMP_KERNEL_TABLE(NAME)                                                                   \
  Kernels {                                                                                      \
    .name = NAME, .gemm = gemm, .decode = decode, .activate = activate, .silu_mul = silu_mul,    \
    .axpy = axpy, .sigmoid_mul = sigmoid_mul, .rms_norm = rms_norm, .l2_norm = l2_norm,          \
    .dot = dot, .residual_mix = residual_mix, .combine = combine, .conv_silu = conv_silu,        \
    .rope = rope, .delta_rule = delta_rule, .attend = attend, .max = max_of, .sum_exp = sum_exp, \
  }
