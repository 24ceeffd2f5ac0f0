"""Sources of the kernels of a cross entropy, in the part of C that `cuda_sources` describes.

A team of threads works on a token: a warp where classes are few, a block where they are many. Each
thread goes through its part of the classes, sixteen bytes at a time, and the team puts its results
together; on a host a team is one thread, which has all classes.

    EACH_TOKEN(t, n, team) { one token }   CUDA: teams stride over tokens    host: t = 0 … n − 1
    EACH_OF(i, n, team) { one class }      CUDA: threads of a team stride    host: i = 0 … n − 1
"""

from __future__ import annotations

from stratagem.simulator.base.precision import FORMATS

WARP, BLOCK = 32, 256
"""Threads of a team: those that exchange registers, or all of a block."""

LOSS_FORMATS = ("float32", "bfloat16")
"""Formats of logits that the kernels read."""

_CODES = "".join(f"#define {name.upper()} {[*FORMATS].index(name)}\n" for name in LOSS_FORMATS)

_TEAMS = r"""
#ifdef __CUDACC__
typedef uint4 vector;
#define UNROLLED _Pragma("unroll")
#define SEVERAL _Pragma("unroll 2") /* as many loads on their way at a time */
#define EACH_TOKEN(t, n, team) \
    for (long long t = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / (team); t < (n); \
         t += gridDim.x * (long long)blockDim.x / (team))
#define EACH_OF(i, n, team) for (long long i = threadIdx.x % (team); i < (n); i += (team))
#define LEADS(team) (threadIdx.x % (team) == 0)
#else
typedef struct { word x, y, z, w; } vector;
#define UNROLLED
#define SEVERAL
#define EACH_TOKEN(t, n, team) for (long long t = 0; t < (n); ++t)
#define EACH_OF(i, n, team) for (long long i = 0; i < (n); ++i)
#define LEADS(team) 1
#endif

#define SIZE(type) ((type) == FLOAT32 ? 4 : 2)
#define LANES(type) (16 / SIZE(type))

/* The largest of some logits, and the sum of exp(x - largest). */
struct powers {
    float largest, sum;
};

/* What logits are counted from: where none is above -inf, each has a power of 0. */
DEVICE float base_of(float largest) {
    return largest == -1.0f / 0.0f ? 0.0f : largest;
}

DEVICE struct powers together(struct powers a, float largest, float sum) {
    struct powers made;
    made.largest = a.largest > largest ? a.largest : largest;
    const float base = base_of(made.largest);
    made.sum = a.sum * expf(a.largest - base) + sum * expf(largest - base);
    return made;
}

/* Every thread of a team gets what all of them found. */
DEVICE struct powers of_team(struct powers own, int team) {
#ifdef __CUDACC__
    __shared__ struct powers parts[32];
    for (int step = 16; step; step /= 2) {
        const float largest = __shfl_xor_sync(0xffffffffu, own.largest, step);
        const float sum = __shfl_xor_sync(0xffffffffu, own.sum, step);
        own = together(own, largest, sum);
    }
    if (team == 32) return own;
    __syncthreads(); /* What was there of the token before has been read. */
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
    __syncthreads();
    own = parts[0];
    for (int i = 1; i < team / 32; ++i) own = together(own, parts[i].largest, parts[i].sum);
#endif
    return own;
}

DEVICE word word_of(vector held, int k) {
    return k == 0 ? held.x : k == 1 ? held.y : k == 2 ? held.z : held.w;
}

DEVICE float lane_of(vector held, int type, int k) {
    union bits made;
    if (type == FLOAT32)
        made.pattern = word_of(held, k);
    else
        made.pattern = k % 2 ? word_of(held, k / 2) & 0xffff0000u : word_of(held, k / 2) << 16;
    return made.number;
}

DEVICE word packed(const float *lanes, int type, int k) {
    union bits made;
    if (type != FLOAT32)
        return to_bfloat16(lanes[2 * k]) | (word)to_bfloat16(lanes[2 * k + 1]) << 16;
    made.number = lanes[k];
    return made.pattern;
}

/* How many elements lie before the first that begins sixteen bytes. */
DEVICE long long before_vectors(const char *row, int type, long long classes) {
    const long long count = (long long)((16 - (unsigned long long)row % 16) % 16) / SIZE(type);
    return count < classes ? count : classes;
}
"""

_SUMS = r"""
DEVICE struct powers with_vector(struct powers found, vector held, int type) {
    struct powers made = {found.largest, 0};
    UNROLLED for (int k = 0; k < LANES(type); ++k) {
        const float x = lane_of(held, type, k);
        made.largest = x > made.largest ? x : made.largest;
    }
    const float base = base_of(made.largest);
    made.sum = found.sum * expf(found.largest - base);
    UNROLLED for (int k = 0; k < LANES(type); ++k)
        made.sum += expf(lane_of(held, type, k) - base);
    return made;
}

DEVICE struct powers sums_of(const char *row, int type, long long classes, int team) {
    const long long first = before_vectors(row, type, classes);
    const long long vectors = (classes - first) / LANES(type);
    const long long stop = first + vectors * LANES(type);
    const vector *body = (const vector *)(row + first * SIZE(type));
    struct powers found = {-1.0f / 0.0f, 0};
    EACH_OF(i, first, team) found = together(found, element(row, type, i), 1);
    SEVERAL EACH_OF(i, vectors, team) found = with_vector(found, body[i], type);
    EACH_OF(i, classes - stop, team) found = together(found, element(row, type, stop + i), 1);
    return of_team(found, team);
}

/* Per token the largest logit, the sum of exp(x - largest), and the logit of the target: 0 where
   it is ignored, not a number where there is no such class. A row begins every `stride`. */
KERNEL(loss_sums)(const void *rows, int type, long long stride, long long classes,
                  const long long *target, long long ignored, int team, float *largest,
                  float *sums, float *own, long long n) {
    EACH_TOKEN(t, n, team) {
        const char *row = (const char *)rows + t * stride * SIZE(type);
        const struct powers found = type == FLOAT32 ? sums_of(row, FLOAT32, classes, team)
                                                    : sums_of(row, BFLOAT16, classes, team);
        if (LEADS(team)) {
            const long long at = target[t];
            const int known = at >= 0 && at < classes;
            largest[t] = found.largest;
            sums[t] = found.sum;
            own[t] = at == ignored ? 0 : known ? element(row, type, at) : 0.0f / 0.0f;
        }
    }
}
"""

_GRADIENT = r"""
/* What the gradients of a token's logits are made of. */
struct slope {
    float base, factor, addend;
    long long target;
};

DEVICE float slope_at(struct slope given, float x, long long i) {
    const float made = expf(x - given.base) * given.factor;
    return i == given.target ? made + given.addend : made;
}

DEVICE void slopes_of(const char *__restrict__ row, char *__restrict__ made, int type,
                      long long classes, int team, struct slope given) {
    const int alike = ((unsigned long long)row - (unsigned long long)made) % 16 == 0;
    const long long first = alike ? before_vectors(row, type, classes) : classes;
    const long long vectors = (classes - first) / LANES(type);
    const long long stop = first + vectors * LANES(type);
    const vector *__restrict__ body = (const vector *)(row + first * SIZE(type));
    vector *__restrict__ made_body = (vector *)(made + first * SIZE(type));
    EACH_OF(i, first, team)
        put_element(made, type, i, slope_at(given, element(row, type, i), i));
    SEVERAL EACH_OF(i, vectors, team) {
        const vector held = body[i];
        vector packs;
        float lanes[8];
        UNROLLED for (int k = 0; k < LANES(type); ++k)
            lanes[k] = slope_at(given, lane_of(held, type, k), first + i * LANES(type) + k);
        packs.x = packed(lanes, type, 0);
        packs.y = packed(lanes, type, 1);
        packs.z = packed(lanes, type, 2);
        packs.w = packed(lanes, type, 3);
        made_body[i] = packs;
    }
    EACH_OF(i, classes - stop, team) {
        const long long at = stop + i;
        put_element(made, type, at, slope_at(given, element(row, type, at), at));
    }
}

/* exp(x - largest) * factor, and the addend at a target that is not ignored; not a number where
   there is no such class. Rows of what is made lie side by side. */
KERNEL(loss_gradient)(const void *__restrict__ rows, int type, long long stride, long long classes,
                      const long long *target, long long ignored, int team,
                      const float *largest, const float *factors, const float *addends,
                      void *__restrict__ made, long long n) {
    EACH_TOKEN(t, n, team) {
        const char *row = (const char *)rows + t * stride * SIZE(type);
        char *to = (char *)made + t * classes * SIZE(type);
        const long long at = target[t];
        const int odd = at != ignored && (at < 0 || at >= classes);
        const struct slope given = {base_of(largest[t]), odd ? 0.0f / 0.0f : factors[t],
                                    addends[t], at == ignored ? -1 : at};
        if (type == FLOAT32)
            slopes_of(row, to, FLOAT32, classes, team, given);
        else
            slopes_of(row, to, BFLOAT16, classes, team, given);
    }
}
"""

LOSSES = _CODES + _TEAMS + _SUMS + _GRADIENT
LOSS_KERNELS = ("loss_sums", "loss_gradient")
