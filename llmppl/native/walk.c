/* Masks of a vocabulary in C: plain functions over arrays that numpy owns, called by ctypes (`llmppl/native/__init__.py`).

   `walk` reads a vocabulary's trie beside an automaton. `row` makes the next states of an automaton by the subset
   construction (Rabin & Scott 1959). `class_of` finds the bytes that lead from a state to the same states, and `slice_of` the
   tokens that consist of them.

   A function that lacks something returns its name, and the caller provides it and calls again: a row that is computed
   in Python, room in an array. State 0 is dead. No function allocates memory or keeps a pointer. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

enum { DONE, ROW, EXITS, FULL, STATES, MEMBERS, STATES_SPENT, STEPS_SPENT, BROKEN };

typedef struct {                /* as llmppl.constraints.vocabulary.trie.Trie, nodes in preorder */
    int32_t num_nodes, num_tokens;
    const uint8_t *byte;
    const uint16_t *depth;
    const int32_t *skip;        /* the first node after the subtree */
    const uint32_t *first;      /* the tokens that end in node i are order[first[i]] .. order[first[i + 1] - 1] */
    const int32_t *order;
} Trie;

typedef struct {                /* NFA without guards, and the sets of its states that are states of an automaton */
    int32_t num_states, num_edges;
    const int32_t *edge_begin, *edge_to;        /* state q reads the edges edge_begin[q] .. edge_begin[q + 1] - 1 */
    const uint8_t *edge_low, *edge_high;
    const int32_t *epsilon_begin, *epsilon_to;
    int64_t states_left, steps_left;            /* of the budget */
    int64_t num_members, max_members, num_slots;
    int64_t *begin;             /* set i is members[begin[i]] .. members[begin[i + 1] - 1], ascending */
    int32_t *members;
    int32_t *slots;             /* hash table of sets, 0 where empty; num_slots is a power of 2 */
    int32_t *state_of;          /* by NFA state: the set of its closure, 0 if not made yet */
    uint32_t *seen;             /* by NFA state: the last closure that met it */
    int32_t *stack, *found, *targets;           /* scratch: num_states, num_states and num_edges entries */
    uint32_t closure;           /* the number of closures so far */
} Subsets;

typedef struct {
    int32_t num_states, max_states;
    int32_t *table;             /* table[256 s + byte] is the next state; negative if unknown */
    uint8_t *ready;             /* 1 if the row is computed */
    uint8_t *exits;             /* 1 if the state has exits (in a DFA: accepts), 0 if not, 2 if unknown */
    Subsets *subsets;           /* makes rows, unless NULL */
} Automaton;

typedef struct {
    const int32_t *roots;       /* read below these nodes, -1 for the whole trie */
    int32_t num_roots, start;
    int32_t *stack;             /* the state by depth: max_depth entries, the greatest depth of a node and 2 */
    int32_t max_depth;
    const int32_t *jump;        /* the first node to read from each node on, or NULL */
    uint8_t *mask;              /* 1 at each token that fits; or NULL, and `ids` and `ends` list tokens and their states */
    int32_t *ids, *ends;        /* with a mask, `ids` lists the tokens while they are at most max_ids */
    int32_t *exit_nodes, *exit_states;          /* nodes above others where a state with exits is met; or NULL */
    int64_t max_ids, max_exits;
    int64_t num_ids, num_exits;
    int32_t root, node, state;  /* where to go on (node -2: at the beginning), and the state that lacks something */
} Walk;

API uint32_t digest(void) { return WALK_DIGEST; }

/* ---- sets of NFA states */

static uint32_t hash_of(const int32_t *set, int64_t size) {
    uint64_t hash = 1469598103934665603u;
    for (int64_t i = 0; i < size; i++) hash = (hash ^ (uint32_t)set[i]) * 1099511628211u;
    return (uint32_t)(hash ^ hash >> 32);
}

/* Return the slot of a set, or the empty slot where it belongs. */
static int64_t slot_of(const Subsets *subsets, const int32_t *set, int64_t size) {
    int64_t last = subsets->num_slots - 1, at = hash_of(set, size) & last;
    for (; subsets->slots[at]; at = (at + 1) & last) {
        int64_t begin = subsets->begin[subsets->slots[at]];
        if (subsets->begin[subsets->slots[at] + 1] - begin == size
            && !memcmp(subsets->members + begin, set, sizeof(int32_t) * (size_t)size)) break;
    }
    return at;
}

/* Enter all sets into an empty hash table. */
API void rehash(Automaton *automaton) {
    Subsets *subsets = automaton->subsets;
    for (int32_t state = 1; state < automaton->num_states; state++) {
        int64_t begin = subsets->begin[state];
        subsets->slots[slot_of(subsets, subsets->members + begin, subsets->begin[state + 1] - begin)] = state;
    }
}

/* Number the set `found`, and store its number. NFA state 0 accepts. */
static int number_of(Automaton *automaton, int32_t size, int32_t *number) {
    Subsets *subsets = automaton->subsets;
    const int32_t *set = subsets->found;
    int64_t slot = slot_of(subsets, set, size);
    if (subsets->slots[slot]) { *number = subsets->slots[slot]; return DONE; }
    if (subsets->states_left <= 0) return STATES_SPENT;
    if (automaton->num_states >= automaton->max_states) return STATES;
    if (subsets->num_members + size > subsets->max_members) return MEMBERS;
    int32_t state = automaton->num_states;
    memcpy(subsets->members + subsets->num_members, set, sizeof(int32_t) * (size_t)size);
    subsets->begin[state] = subsets->num_members;
    subsets->num_members += size;
    subsets->begin[state + 1] = subsets->num_members;
    subsets->slots[slot] = state;
    automaton->exits[state] = size > 0 && set[0] == 0;
    automaton->ready[state] = 0;
    automaton->num_states = state + 1;
    subsets->states_left--;
    *number = state;
    return DONE;
}

static int ascending(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Set `found` to the states that some states become without reading, ascending; return their number. */
static int32_t close_over(Subsets *subsets, const int32_t *states, int32_t size) {
    int32_t count = 0, height = 0, is_sorted = 1;
    if (++subsets->closure == 0) {              /* the numbers begin again */
        memset(subsets->seen, 0, sizeof(uint32_t) * (size_t)subsets->num_states);
        subsets->closure = 1;
    }
    for (int32_t i = 0; i < size; i++) {
        if (subsets->seen[states[i]] == subsets->closure) continue;
        subsets->seen[states[i]] = subsets->closure;
        subsets->stack[height++] = states[i];
        while (height) {
            int32_t state = subsets->stack[--height];
            int32_t begin = subsets->epsilon_begin[state], end = subsets->epsilon_begin[state + 1];
            if (begin == end) {
                is_sorted &= !count || subsets->found[count - 1] < state;
                subsets->found[count++] = state;
            }
            for (int32_t k = begin; k < end; k++) {
                int32_t next = subsets->epsilon_to[k];
                if (subsets->seen[next] == subsets->closure) continue;
                subsets->seen[next] = subsets->closure;
                subsets->stack[height++] = next;
            }
        }
    }
    if (!is_sorted) qsort(subsets->found, (size_t)count, sizeof(int32_t), ascending);
    return count;
}

/* Store the state of the closure of the first `size` targets. */
static int state_of_targets(Automaton *automaton, int32_t size, int32_t *state) {
    Subsets *subsets = automaton->subsets;
    int32_t only = subsets->targets[0];
    *state = size == 1 ? subsets->state_of[only] : 0;
    if (*state) return DONE;
    int32_t count = close_over(subsets, subsets->targets, size), known = automaton->num_states;
    int status = number_of(automaton, count, state);
    if (status != DONE) return status;
    if (size == 1) subsets->state_of[only] = *state;
    subsets->steps_left -= *state < known ? (size + count) / 16 : size + count;
    return DONE;
}

/* Number the closure of the first `size` targets. */
API int begin(Automaton *automaton, int32_t size, int32_t *state) {
    return state_of_targets(automaton, size, state);
}

/* Compute the next states of a state. */
API int row(Automaton *automaton, int32_t state) {
    Subsets *subsets = automaton->subsets;
    uint8_t cut[257] = {0};
    int64_t begin = subsets->begin[state], end = subsets->begin[state + 1], edges = 0;
    int32_t *into = automaton->table + ((int64_t)state << 8);
    for (int64_t i = begin; i < end; i++) {
        int32_t q = subsets->members[i];
        for (int32_t k = subsets->edge_begin[q]; k < subsets->edge_begin[q + 1]; k++, edges++)
            cut[subsets->edge_low[k]] = cut[subsets->edge_high[k] + 1] = 1;
    }
    if (subsets->steps_left <= 0) return STEPS_SPENT;
    for (int low = 0, high; low < 256; low = high) {
        int32_t size = 0, next = 0;
        for (high = low + 1; high < 256 && !cut[high];) high++;
        for (int64_t i = begin; i < end; i++) {
            int32_t q = subsets->members[i];
            for (int32_t k = subsets->edge_begin[q]; k < subsets->edge_begin[q + 1]; k++)
                if (subsets->edge_low[k] <= low && low <= subsets->edge_high[k])
                    subsets->targets[size++] = subsets->edge_to[k];
        }
        if (size) {
            int status = state_of_targets(automaton, size, &next);
            if (status != DONE) return status;
        }
        for (int byte = low; byte < high; byte++) into[byte] = next;
    }
    if (end - begin > 1) subsets->steps_left -= 8 * (end - begin) + 3 * edges;
    automaton->ready[state] = 1;
    return DONE;
}

/* Compute the rows from a state on, while there are at most so many states; *state is the next one. */
API int rows(Automaton *automaton, int32_t *state, int32_t most) {
    for (; *state < automaton->num_states && automaton->num_states <= most + 1; ++*state) {
        if (automaton->ready[*state]) continue;
        int status = row(automaton, *state);
        if (status != DONE) return status;
    }
    return DONE;
}

static int is_ready(Automaton *automaton, int32_t state) {
    if (automaton->ready[state]) return DONE;
    return automaton->subsets ? row(automaton, state) : ROW;
}

/* ---- the trie */

/* Read the tokens below some nodes from a state. */
API int walk(const Trie *trie, Automaton *automaton, Walk *walk) {
    for (; walk->root < walk->num_roots; walk->root++, walk->node = -2) {
        int32_t root = walk->roots[walk->root];
        int32_t above = root < 0 ? 0 : trie->depth[root] + 1;
        int32_t end = root < 0 ? trie->num_nodes : trie->skip[root];
        int32_t node = walk->node == -2 ? root + 1 : walk->node;
        walk->stack[0] = walk->start;
        while (node < end) {
            if (walk->jump && (node = walk->jump[node]) >= end) break;
            int32_t depth = trie->depth[node] - above;
            int32_t state = walk->stack[depth];
            walk->node = node;
            walk->state = state;
            int status = is_ready(automaton, state);
            if (status != DONE) return status;
            int32_t next = automaton->table[((int64_t)state << 8) + trie->byte[node]];
            if (next < 0) return ROW;
            if (!next) { node = trie->skip[node]; continue; }
            if (next >= automaton->num_states || depth + 1 >= walk->max_depth) return BROKEN;
            uint32_t first = trie->first[node], last = trie->first[node + 1];
            if (walk->exit_nodes && trie->skip[node] > node + 1) {
                walk->state = next;
                if (automaton->exits[next] == 2) return EXITS;
                if (automaton->exits[next] && walk->num_exits >= walk->max_exits) return FULL;
            }
            if (!walk->mask && walk->num_ids + (last - first) > walk->max_ids) return FULL;
            for (uint32_t k = first; k < last; k++) {
                int32_t id = trie->order[k];
                if (!walk->mask) {
                    walk->ids[walk->num_ids] = id;
                    walk->ends[walk->num_ids++] = next;
                } else if (!walk->mask[id]) {
                    walk->mask[id] = 1;
                    if (walk->num_ids < walk->max_ids) walk->ids[walk->num_ids] = id;
                    walk->num_ids++;
                }
            }
            if (walk->exit_nodes && trie->skip[node] > node + 1 && automaton->exits[next]) {
                walk->exit_nodes[walk->num_exits] = node;
                walk->exit_states[walk->num_exits++] = next;
            }
            walk->stack[depth + 1] = next;
            node++;
        }
    }
    return DONE;
}

/* Set `mask` to 1 at the tokens of at most `longest` bytes, all with inside[byte], and jump[i] to the first node from i
   on whose subtree has another token. Return the length of the longest token of the mask. */
API int32_t slice_of(const Trie *trie, const uint8_t *inside, int32_t longest, uint8_t *mask, int32_t *jump,
                     int32_t *stack) {
    int32_t most = 0, next_other = trie->num_nodes;
    stack[0] = 1;
    for (int32_t node = 0; node < trie->num_nodes; node++) {
        int32_t depth = trie->depth[node];
        stack[depth + 1] = stack[depth] && inside[trie->byte[node]] && depth < longest;
        if (!stack[depth + 1]) continue;
        for (uint32_t k = trie->first[node]; k < trie->first[node + 1]; k++) {
            mask[trie->order[k]] = 1;
            if (depth + 1 > most) most = depth + 1;
        }
    }
    jump[trie->num_nodes] = trie->num_nodes;
    for (int32_t node = trie->num_nodes - 1; node >= 0; node--) {
        for (uint32_t k = trie->first[node]; k < trie->first[node + 1]; k++)
            if (!mask[trie->order[k]]) next_other = node;
        jump[node] = next_other < trie->skip[node] ? node : jump[node + 1];
    }
    return most;
}

/* Set `inside` to the bytes below 128 that lead from a state to the state where most of them lead. Set `length` to the
   number of these bytes that may follow, whichever, at most `longest`; 0 if the bytes are fewer than `least`. With
   `alone`, states with exits do not count. Without DONE, `length` is the state that lacks its row
   or its exits. */
API int class_of(Automaton *automaton, int32_t state, int32_t alone, int32_t least, int32_t longest, uint8_t *inside,
                 int32_t *length) {
    int32_t best = 0, most = 0;
    *length = 0;
    int status = is_ready(automaton, state);
    if (status != DONE) { *length = state; return status; }
    const int32_t *from = automaton->table + ((int64_t)state << 8);
    for (int byte = 33; byte < 127; byte += 5) {        /* a sample */
        int32_t count = 0;
        if (from[byte] < 0) { *length = state; return ROW; }
        if (!from[byte] || from[byte] == best) continue;
        for (int other = 0; other < 128; other++) count += from[other] == from[byte];
        if (count > most) { most = count; best = from[byte]; }
    }
    if (most < least) return DONE;
    for (int byte = 0; byte < 256; byte++) inside[byte] = byte < 128 && best && from[byte] == best;
    while (best && *length < longest) {
        int32_t next = 0;
        status = is_ready(automaton, state);
        if (status != DONE) { *length = state; return status; }
        from = automaton->table + ((int64_t)state << 8);
        for (int byte = 0; byte < 128 && next >= 0; byte++) {
            if (!inside[byte]) continue;
            if (from[byte] < 0) { *length = state; return ROW; }
            if (!next) next = from[byte];
            if (!next || from[byte] != next) next = -1;
        }
        if (next <= 0 || next >= automaton->num_states) break;
        if (alone && automaton->exits[next] == 2) { *length = next; return EXITS; }
        if (alone && automaton->exits[next]) break;
        *length = next == state ? longest : *length + 1;
        state = next;
    }
    return DONE;
}

/* Return the state after some bytes, 0 if they do not fit; *at is the first byte that was not read, at a status. */
API int after(Automaton *automaton, int32_t *state, const uint8_t *bytes, int32_t size, int32_t *at) {
    for (; *at < size; ++*at) {
        int status = is_ready(automaton, *state);
        if (status != DONE) return status;
        int32_t next = automaton->table[((int64_t)*state << 8) + bytes[*at]];
        if (next < 0) return ROW;
        if (next >= automaton->num_states) return BROKEN;
        if (!next) return DONE;
        *state = next;
    }
    return DONE;
}
