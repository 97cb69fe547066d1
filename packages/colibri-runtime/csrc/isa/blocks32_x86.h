/* What the kernels for blocks of 32 share on x86. */
#ifndef COLIBRI_BLOCKS32_X86_H
#define COLIBRI_BLOCKS32_X86_H

#include <immintrin.h>

#include "blocks32.h"

/* How far ahead of its use a line is asked for. Measured on 1 GiB of interleaved Q4_0 and Q8_0 at 4
 * tokens, Xeon (Sapphire Rapids): none 7.4 and 7.6 GB/s, 1024 8.4 and 9.3, 2048 9.7 and 10.5, 4096
 * 10.3 and 11.2, 8192 10.9 and 11.2; into the first level only (NTA) 9.0 and 6.5. */
#define PREFETCH_BYTES 4096

#endif
