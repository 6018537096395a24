/* The search of table.py, for many hashes in one call. Built by hatch_build.py; table.py searches without it, slower.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define WORDS 4
#define NONE (-1)
#define EMPTY (-1)
#define AHEAD 8 /* hashes for which memory is fetched while others are compared */

static size_t home(const uint64_t *words, const uint64_t *factors, unsigned shift)
{
    return (words[0] * factors[0] + words[1] * factors[1] + words[2] * factors[2] + words[3] * factors[3]) >> shift;
}

/* Writes to `found[i]` the row whose hash is `words[i]`, or NONE. `rows` is the table, of `mask + 1` places. */
void kvstore_find(size_t num_hashes, const uint64_t *words, const uint64_t *factors, uint64_t shift, uint64_t mask,
                  const int32_t *rows, const uint64_t *words_of, int64_t *found)
{
    for (size_t i = 0; i < num_hashes; i++) {
        if (i + 2 * AHEAD < num_hashes)
            __builtin_prefetch(&rows[home(&words[(i + 2 * AHEAD) * WORDS], factors, shift)]);
        if (i + AHEAD < num_hashes) {
            int32_t row = rows[home(&words[(i + AHEAD) * WORDS], factors, shift)];
            __builtin_prefetch(&words_of[(row < 0 ? 0 : (size_t)row) * WORDS]);
        }
        const uint64_t *wanted = &words[i * WORDS];
        found[i] = NONE;
        for (size_t place = home(wanted, factors, shift); rows[place] != EMPTY; place = (place + 1) & mask) {
            int32_t row = rows[place];
            if (row >= 0 && memcmp(&words_of[(size_t)row * WORDS], wanted, WORDS * sizeof *wanted) == 0) {
                found[i] = row;
                break;
            }
        }
    }
}
