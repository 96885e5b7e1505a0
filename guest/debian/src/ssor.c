/* Symmetric Gauss-Seidel sweeps over doubles that fill the given number of MiB: the memory behaviour of
 * LU of the NAS parallel benchmarks, with one unknown instead of five, and many zones as in its
 * multi-zone version. Each zone is a cube in which heat spreads from a source whose strength changes at
 * every step, so that every step writes new values all over the zone. Never ends. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Points along each edge of a zone, its border included; a zone has 20 MiB. */
#define EDGE 96
#define POINTS ((size_t)EDGE * EDGE * EDGE)
#define ROW ((size_t)EDGE)
#define PLANE ((size_t)EDGE * EDGE)

/* The step of time over the square of the distance of two points. */
#define C 1.0
#define DIAGONAL (1.0 + 6.0 * C)

struct zone {
    double *heat, *change, *source;
};

#define FOR_ALL_INSIDE(at)                                  \
    for (size_t z = 1; z < EDGE - 1; z++)                   \
        for (size_t y = 1; y < EDGE - 1; y++)               \
            for (size_t at = z * PLANE + y * ROW + 1,       \
                        end_ = at + EDGE - 2; at < end_; at++)

static void right_hand_side(struct zone *zone, double strength)
{
    const double *u = zone->heat;

    FOR_ALL_INSIDE(at)
        zone->change[at] = strength * zone->source[at] +
            C * (u[at - 1] + u[at + 1] + u[at - ROW] + u[at + ROW] +
                 u[at - PLANE] + u[at + PLANE] - 6.0 * u[at]);
}

static void lower_sweep(struct zone *zone)
{
    double *r = zone->change;

    FOR_ALL_INSIDE(at)
        r[at] = (r[at] + C * (r[at - 1] + r[at - ROW] + r[at - PLANE])) / DIAGONAL;
}

static void upper_sweep(struct zone *zone)
{
    double *r = zone->change;

    for (size_t z = EDGE - 2; z > 0; z--)
        for (size_t y = EDGE - 2; y > 0; y--)
            for (size_t x = EDGE - 2; x > 0; x--) {
                size_t at = z * PLANE + y * ROW + x;
                r[at] += C / DIAGONAL * (r[at + 1] + r[at + ROW] + r[at + PLANE]);
            }
}

/* The largest heat in the zone after it. */
static double add_change(struct zone *zone)
{
    double largest = 0.0;

    FOR_ALL_INSIDE(at) {
        zone->heat[at] += zone->change[at];
        largest = fmax(largest, fabs(zone->heat[at]));
    }
    return largest;
}

/* Uniform in -1 to 1; xorshift64. */
static double random_number(void)
{
    static uint64_t state = 88172645463325252u;

    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) / (double)(1ull << 52) - 1.0;
}

static int make_zone(struct zone *zone)
{
    zone->heat = calloc(POINTS, sizeof(double));
    zone->change = calloc(POINTS, sizeof(double));
    zone->source = calloc(POINTS, sizeof(double));
    if (!zone->heat || !zone->change || !zone->source)
        return 0;
    FOR_ALL_INSIDE(at)
        zone->source[at] = random_number();
    return 1;
}

static int fail(const char *why)
{
    fprintf(stderr, "ssor: %s\n", why);
    return 1;
}

int main(int count, char **arguments)
{
    size_t mib = count == 2 ? strtoul(arguments[1], NULL, 10) : 0;
    size_t zones = (mib << 20) / (3 * POINTS * sizeof(double));
    struct zone *zone = zones ? calloc(zones, sizeof(*zone)) : NULL;

    if (!zone)
        return fail("usage: ssor MIB (21 or more)");
    for (size_t each = 0; each < zones; each++)
        if (!make_zone(&zone[each]))
            return fail("too little memory");
    puts("lab ready");
    fflush(stdout);
    for (uint64_t step = 0;; step++) {
        struct zone *now = &zone[step % zones];

        right_hand_side(now, random_number());
        lower_sweep(now);
        upper_sweep(now);
        /* Its border is cold: the heat stays well below this, unless a value was lost. */
        if (!(add_change(now) < 1e3))
            return fail("the heat is out of bounds");
        printf("lab unit %llu\n", (unsigned long long)step + 1);
        fflush(stdout);
    }
}
