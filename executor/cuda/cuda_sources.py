"""Sources of the CUDA kernels, in the part of C that a C compiler of the host understands too.

What one element needs is a function; under CUDA a kernel calls it from many threads, on a host a
loop does. So the arithmetic that runs on a GPU can be run, and tested, anywhere.

    EACH(i, n) { one element }     CUDA: i strides over the grid     host: i = 0 … n − 1
"""

from __future__ import annotations

from stratagem.simulator.base.precision import FORMATS

PRELUDE = r"""
#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define KERNEL(name) extern "C" __global__ void name
#define EACH(i, n) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n); \
         i += gridDim.x * (long long)blockDim.x)
#else
#include <math.h>
#define DEVICE static inline
#define KERNEL(name) void name
#define EACH(i, n) for (long long i = 0; i < (n); ++i)
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
    if (given != given) return 0x7fc0;
    return (unsigned short)((made.pattern + 0x7fff + ((made.pattern >> 16) & 1)) >> 16);
}

"""

ACCESS = {
    "float32": ("((const float *)held)[i]", "((float *)held)[i] = given"),
    "bfloat16": (
        "from_bfloat16(((const unsigned short *)held)[i])",
        "((unsigned short *)held)[i] = to_bfloat16(given)",
    ),
}
"""Formats that kernels read gradients in and write copies in, and how an element is."""

TYPE_CODES = {name: code for code, name in enumerate(FORMATS) if name in ACCESS}
"""What tells a kernel a format: its place among those of `base.precision`."""


def _access() -> str:
    """Reading and writing an element by the code of its format."""
    known = [(TYPE_CODES[name], *each) for name, each in ACCESS.items()]
    reads = "".join(f"    case {code}: return {read};\n" for code, read, _ in known)
    writes = "".join(f"    case {code}: {write}; break;\n" for code, _, write in known)
    return f"""
DEVICE float element(const void *held, int type, long long i) {{
    switch (type) {{
{reads}    default: return 0.0f / 0.0f;
    }}
}}

DEVICE void put_element(void *held, int type, long long i, float given) {{
    switch (type) {{
{writes}    }}
}}
"""


OPTIMIZERS = r"""
/* Kingma and Ba 2015 with the weight decay of Loshchilov and Hutter 2019. `count` is the number
   of this update, from 1; `copy` may be null, or gets the new parameter in its own format. */
KERNEL(adam)(float *parameter, const void *gradient, int gradient_type, float *mean,
             float *square, void *copy, int copy_type, const float *rate, const int *count,
             double first, double second, double decay, double epsilon, long long n) {
    const float step = (float)((double)*rate / (1 - pow(first, (double)*count)));
    const float root = (float)sqrt(1 - pow(second, (double)*count));
    const float keep = (float)(1 - (double)*rate * decay);
    const float a = (float)(1 - first), b = (float)second, c = (float)(1 - second);
    EACH(i, n) {
        const float g = element(gradient, gradient_type, i);
        const float m = mean[i] + a * (g - mean[i]);
        const float v = b * square[i] + c * g * g;
        const float p = parameter[i] * keep - step * m / (sqrtf(v) / root + (float)epsilon);
        mean[i] = m;
        square[i] = v;
        parameter[i] = p;
        if (copy) put_element(copy, copy_type, i, p);
    }
}

/* p -= rate * (g + decay * p) */
KERNEL(sgd)(float *parameter, const void *gradient, int gradient_type, void *copy,
            int copy_type, const float *rate, double decay, long long n) {
    EACH(i, n) {
        const float g = element(gradient, gradient_type, i) + (float)decay * parameter[i];
        const float p = parameter[i] - *rate * g;
        parameter[i] = p;
        if (copy) put_element(copy, copy_type, i, p);
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

SOURCE = PRELUDE + _access() + OPTIMIZERS + RANDOM
KERNELS = ("adam", "sgd", "words")
