/* Copies and hashes many pieces of memory in one call, so that the caller's interpreter can let go of its lock once
 * for all of them. Built by hatch_build.py; kvstore/transport/memory.py loads it, and does the same without it.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef uint64_t (*hash_function)(const void *data, size_t size_bytes);

/* Smaller copies may be read again while they are in the cache; larger ones would only push other data out. */
#define STREAM_BYTES (32 << 10)
#define LINE_BYTES 64
#define AHEAD_BYTES 1024 /* of the reads: the processor's own look-ahead ends at each page */

/* Writes past the cache: an ordinary store reads each line from memory first, a third of the traffic for nothing. */
static void copy(char *target, const char *source, size_t size_bytes)
{
#ifdef __SSE2__
    if (size_bytes >= STREAM_BYTES) {
        size_t head = -(uintptr_t)target % LINE_BYTES;
        memcpy(target, source, head);
        target += head;
        source += head;
        size_bytes -= head;
        for (; size_bytes >= LINE_BYTES; size_bytes -= LINE_BYTES) {
            __m128i first = _mm_loadu_si128((const __m128i *)source);
            __m128i second = _mm_loadu_si128((const __m128i *)source + 1);
            __m128i third = _mm_loadu_si128((const __m128i *)source + 2);
            __m128i fourth = _mm_loadu_si128((const __m128i *)source + 3);
            _mm_prefetch(source + AHEAD_BYTES, _MM_HINT_T0); /* never faults, even past the end */
            _mm_stream_si128((__m128i *)target, first);
            _mm_stream_si128((__m128i *)target + 1, second);
            _mm_stream_si128((__m128i *)target + 2, third);
            _mm_stream_si128((__m128i *)target + 3, fourth);
            source += LINE_BYTES;
            target += LINE_BYTES;
        }
        _mm_sfence(); /* whoever is told that the bytes are there must see them */
    }
#endif
    memcpy(target, source, size_bytes);
}

/* `targets` NULL: nothing is copied. `hash` NULL: nothing is hashed. Each piece is hashed right after it was copied,
 * while it is in the cache.
 */
void kvstore_move(size_t num_pieces, const uint64_t *targets, const uint64_t *sources, const uint64_t *sizes,
                  hash_function hash, uint64_t *checksums)
{
    for (size_t piece = 0; piece < num_pieces; piece++) {
        const char *source = (const char *)(uintptr_t)sources[piece];
        if (targets)
            copy((char *)(uintptr_t)targets[piece], source, sizes[piece]);
        if (hash)
            checksums[piece] = hash(source, sizes[piece]);
    }
}
