"""Sources of the CUDA kernels, in the part of C that a C compiler of the host understands too.

What one element needs is a function; under CUDA a kernel calls it from many threads, on a host a
loop does. So the arithmetic that runs on a GPU can be run, and tested, anywhere.

    EACH(i, n) { one element }         CUDA: i strides over the grid     host: i = 0 … n − 1
    EACH_CHUNK(k, n) { one chunk }     CUDA: k strides over the blocks   host: k = 0 … n − 1
    OF_CHUNK(i, first, end, by)        CUDA: i strides over a block      host: i = first … end − by

Optimizers change many tensors in one launch, whose addresses come by value in a `struct tensors`:

    tensor      0 0 0 0 1 2 2 2     each is cut into chunks of CHUNK elements
    chunk       0 1 2 3 4 5 6 7     a block takes one and finds its tensor in `end`
    end         4, 5, 8             up to which chunk a tensor's own go
"""

from __future__ import annotations

import numpy as np

from stratagem.executor.cuda.loss_sources import LOSS_KERNELS, LOSSES
from stratagem.simulator.base.precision import FORMATS

PRELUDE = r"""
#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define KERNEL(name) extern "C" __global__ void name
#define EACH(i, n) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n); \
         i += gridDim.x * (long long)blockDim.x)
#define EACH_CHUNK(k, n) for (int k = blockIdx.x; k < (n); k += gridDim.x)
#define OF_CHUNK(i, first, end, by) \
    for (long long i = (first) + (by) * (long long)threadIdx.x; i < (end); \
         i += (by) * (long long)blockDim.x)
#define BY_VALUE const __grid_constant__
#define ALIGNED(n) __align__(n)
#else
#include <math.h>
#define DEVICE static inline
#define KERNEL(name) void name
#define EACH(i, n) for (long long i = 0; i < (n); ++i)
#define EACH_CHUNK(k, n) for (int k = 0; k < (n); ++k)
#define OF_CHUNK(i, first, end, by) for (long long i = (first); i < (end); i += (by))
#define BY_VALUE const
#define ALIGNED(n)
#endif

typedef unsigned int word;
union bits { float number; word pattern; };

DEVICE float from_bfloat16(unsigned short given) {
    union bits made;
    made.pattern = (word)given << 16;
    return made.number;
}

/* Rounds to the nearest, ties to even; not-a-number stays one. */
DEVICE unsigned short to_bfloat16(float given) {
    union bits made;
    made.number = given;
    const word rounded = (made.pattern + 0x7fff + ((made.pattern >> 16) & 1)) >> 16;
    return (unsigned short)(given != given ? 0x7fc0 : rounded);
}

"""

ACCESS = {
    "float32": ("float", "", ""),
    "bfloat16": ("unsigned short", "from_bfloat16", "to_bfloat16"),
}
"""Formats that kernels read gradients in and write copies in: the type in C of what is held, and
what makes a float of it and it of a float."""

TYPE_CODES = {name: code for code, name in enumerate(FORMATS) if name in ACCESS}
"""What tells a kernel a format: its place among those of `base.precision`."""


def _access() -> str:
    """Reading and writing an element, or four that lie aligned, by the code of their format."""
    read, write, read_four, write_four, structs = [], [], [], [], []
    for name, (kind, load, store) in ACCESS.items():
        case, four = f"    case {TYPE_CODES[name]}:", f"struct four_{name}"
        structs.append(f"{four[:6]} ALIGNED(4 * sizeof({kind})) {four[7:]} {{ {kind} at[4]; }};\n")
        read.append(f"{case} return {load}(((const {kind} *)held)[i]);\n")
        write.append(f"{case} (({kind} *)held)[i] = {store}(given); break;\n")
        read_four.append(
            f"{case} {{\n"
            f"        const {four} found = ((const {four} *)held)[i >> 2];\n"
            f"        for (int j = 0; j < 4; ++j) made.at[j] = {load}(found.at[j]);\n"
            f"        break;\n    }}\n"
        )
        write_four.append(
            f"{case} {{\n"
            f"        {four} made;\n"
            f"        for (int j = 0; j < 4; ++j) made.at[j] = {store}(given.at[j]);\n"
            f"        (({four} *)held)[i >> 2] = made;\n"
            f"        break;\n    }}\n"
        )
    return f"""
{"".join(structs)}
DEVICE float element(const void *held, int type, long long i) {{
    switch (type) {{
{"".join(read)}    default: return 0.0f / 0.0f;
    }}
}}

DEVICE void put_element(void *held, int type, long long i, float given) {{
    switch (type) {{
{"".join(write)}    }}
}}

DEVICE struct four_float32 four_elements(const void *held, int type, long long i) {{
    struct four_float32 made = {{{{0.0f / 0.0f, 0.0f / 0.0f, 0.0f / 0.0f, 0.0f / 0.0f}}}};
    switch (type) {{
{"".join(read_four)}    }}
    return made;
}}

DEVICE void put_four(void *held, int type, long long i, struct four_float32 given) {{
    switch (type) {{
{"".join(write_four)}    }}
}}
"""


MOST_TENSORS = 60
"""That a launch changes: arguments of a kernel have 4096 bytes at most on older drivers."""

MOST_CELLS = 448
"""Counts of updates that a launch raises."""

CHUNK = 4096
"""Elements of a tensor that a block works on."""

FIELDS = (
    ("parameter", "float *", np.uint64),
    ("gradient", "const void *", np.uint64),
    ("mean", "float *", np.uint64),
    ("square", "float *", np.uint64),
    ("copy", "void *", np.uint64),
    ("cell", "const struct cell *", np.uint64),
    ("length", "long long ", np.int64),
    ("end", "int ", np.int32),
    ("gradient_type", "signed char ", np.int8),
    ("copy_type", "signed char ", np.int8),
    ("aligned", "signed char ", np.int8),
)
"""What a launch knows of each tensor that it changes: name, type in C, and as NumPy holds it."""

TENSORS = np.dtype(
    [*((name, held, MOST_TENSORS) for name, _, held in FIELDS), ("count", np.int32)], align=True
)
"""`struct tensors`, as NumPy lays it out."""

CELLS = np.dtype([("cell", np.uint64, MOST_CELLS)], align=True)
"""`struct cells`, as NumPy lays it out."""

TABLES = f"""
#define CHUNK {CHUNK}

/* What the number of updates of a tensor comes to: Adam's step over what the mean lacks as yet,
   the root of what the square lacks, and what decay leaves. */
struct cell {{ int count; float step, root, keep; }};
struct cells {{ struct cell *cell[{MOST_CELLS}]; }};
struct tensors {{
{"".join(f"    {kind}{name}[{MOST_TENSORS}];{chr(10)}" for name, kind, _ in FIELDS)}    int count;
}};
"""

OPTIMIZERS = r"""
/* The tensor that a chunk is of: the first whose own end behind it. */
DEVICE int tensor_of(const int *end, int count, int chunk) {
    int first = 0, last = count - 1;
    while (first < last) {
        const int middle = (first + last) / 2;
        if (end[middle] > chunk) last = middle;
        else first = middle + 1;
    }
    return first;
}

/* Where the elements of a chunk begin and end, and up to where they go by four. */
struct span { long long first, fours, end; };

DEVICE struct span elements_of(const struct tensors *all, int tensor, int chunk) {
    const long long before = tensor ? all->end[tensor - 1] : 0, length = all->length[tensor];
    struct span made;
    made.first = (chunk - before) * CHUNK;
    made.end = made.first + CHUNK < length ? made.first + CHUNK : length;
    made.fours = all->aligned[tensor] ? made.end - (made.end - made.first) % 4 : made.first;
    return made;
}

/* One more update of each tensor. `decay` is that of the parameter itself, before the step. */
KERNEL(count_updates)(BY_VALUE struct cells all, const float *rate, double first, double second,
                      double decay, long long n) {
    EACH(i, n) {
        struct cell *cell = all.cell[i];
        const int count = cell->count + 1;
        cell->count = count;
        cell->step = (float)((double)*rate / (1 - pow(first, (double)count)));
        cell->root = (float)sqrt(1 - pow(second, (double)count));
        cell->keep = (float)(1 - (double)*rate * decay);
    }
}

struct betas { float a, b, c, epsilon; };

DEVICE float adam_of(float g, float p, float *mean, float *square, struct cell now,
                     struct betas by) {
    const float m = *mean + by.a * (g - *mean);
    const float v = by.b * *square + by.c * g * g;
    *mean = m;
    *square = v;
    return p * now.keep - now.step * m / (sqrtf(v) / now.root + by.epsilon);
}

/* Kingma and Ba 2015 with the weight decay of Loshchilov and Hutter 2019. A copy may be null, or
   gets the new parameter in its own format; gradients are multiplied by `scale`, if any. */
KERNEL(adam)(BY_VALUE struct tensors all, const float *scale, double first, double second,
             double epsilon) {
    const struct betas by = {(float)(1 - first), (float)second, (float)(1 - second),
                             (float)epsilon};
    const float times = scale ? *scale : 1.0f;
    EACH_CHUNK(chunk, all.end[all.count - 1]) {
        const int k = tensor_of(all.end, all.count, chunk);
        const struct span part = elements_of(&all, k, chunk);
        const struct cell now = *all.cell[k];
        float *parameter = all.parameter[k], *mean = all.mean[k], *square = all.square[k];
        const void *gradient = all.gradient[k];
        const int gradient_type = all.gradient_type[k], copy_type = all.copy_type[k];
        void *copy = all.copy[k];
        OF_CHUNK(i, part.first, part.fours, 4) {
            const struct four_float32 g = four_elements(gradient, gradient_type, i);
            struct four_float32 p = *(struct four_float32 *)(parameter + i);
            struct four_float32 m = *(struct four_float32 *)(mean + i);
            struct four_float32 v = *(struct four_float32 *)(square + i);
            for (int j = 0; j < 4; ++j)
                p.at[j] = adam_of(times * g.at[j], p.at[j], &m.at[j], &v.at[j], now, by);
            *(struct four_float32 *)(mean + i) = m;
            *(struct four_float32 *)(square + i) = v;
            *(struct four_float32 *)(parameter + i) = p;
            if (copy) put_four(copy, copy_type, i, p);
        }
        OF_CHUNK(i, part.fours, part.end, 1) {
            const float g = times * element(gradient, gradient_type, i);
            const float p = adam_of(g, parameter[i], mean + i, square + i, now, by);
            parameter[i] = p;
            if (copy) put_element(copy, copy_type, i, p);
        }
    }
}

DEVICE float sgd_of(float g, float p, float rate, float decay) {
    return p - rate * (g + decay * p);
}

/* p -= rate * (scale * g + decay * p) */
KERNEL(sgd)(BY_VALUE struct tensors all, const float *scale, const float *rate, double decay) {
    const float times = scale ? *scale : 1.0f, step = *rate, lost = (float)decay;
    EACH_CHUNK(chunk, all.end[all.count - 1]) {
        const int k = tensor_of(all.end, all.count, chunk);
        const struct span part = elements_of(&all, k, chunk);
        float *parameter = all.parameter[k];
        const void *gradient = all.gradient[k];
        const int gradient_type = all.gradient_type[k], copy_type = all.copy_type[k];
        void *copy = all.copy[k];
        OF_CHUNK(i, part.first, part.fours, 4) {
            const struct four_float32 g = four_elements(gradient, gradient_type, i);
            struct four_float32 p = *(struct four_float32 *)(parameter + i);
            for (int j = 0; j < 4; ++j) p.at[j] = sgd_of(times * g.at[j], p.at[j], step, lost);
            *(struct four_float32 *)(parameter + i) = p;
            if (copy) put_four(copy, copy_type, i, p);
        }
        OF_CHUNK(i, part.fours, part.end, 1) {
            const float g = times * element(gradient, gradient_type, i);
            const float p = sgd_of(g, parameter[i], step, lost);
            parameter[i] = p;
            if (copy) put_element(copy, copy_type, i, p);
        }
    }
}
"""

RANDOM = r"""
/* Philox 4x32-10, Salmon et al. 2011; the counter is replaced by the words drawn. */
DEVICE void philox(word *counter, word first, word second) {
    for (int round = 0; round < 10; ++round) {
        const unsigned long long left = 0xD2511F53ULL * counter[0];
        const unsigned long long right = 0xCD9E8D57ULL * counter[2];
        const word b = counter[1], d = counter[3];
        counter[0] = (word)(right >> 32) ^ b ^ first;
        counter[1] = (word)right;
        counter[2] = (word)(left >> 32) ^ d ^ second;
        counter[3] = (word)left;
        first += 0x9E3779B9u;
        second += 0xBB67AE85u;
    }
}

/* A word for each place (row, column), four columns to a counter (column / 4, step, row). The
   step lies on the device, so that a recorded step can be run again as another one. */
KERNEL(words)(const long long *rows, long long num_rows, long long start, long long stop,
              const long long *step, word first, word second, long long *drawn) {
    const long long block = start / 4, width = (stop + 3) / 4 - block;
    EACH(i, num_rows * width) {
        const long long row = i / width, at = block + i % width;
        word counter[4] = {(word)at, (word)*step, (word)rows[row], (word)(rows[row] >> 32)};
        philox(counter, first, second);
        for (int k = 0; k < 4; ++k) {
            const long long column = 4 * at + k;
            if (column >= start && column < stop)
                drawn[row * (stop - start) + column - start] = (long long)counter[k];
        }
    }
}
"""

SOURCE = PRELUDE + _access() + TABLES + OPTIMIZERS + RANDOM + LOSSES
KERNELS = ("count_updates", "adam", "sgd", "words", *LOSS_KERNELS)
