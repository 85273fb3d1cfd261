// SPDX-License-Identifier: Apache-2.0

package order

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// folder has the sources of the counter, as a test of this package sees it.
const folder = "../../pkg/memcap/lib"

// token is a place in the source that states an order: text of a function, with ORDER for it.
type token struct{ name, file, function, text string }

// kept are orders that Arm does not need, since another one does their work there, and that C
// does: its rules let a compiler do more than Arm's processors do.
var kept = map[string]string{
	"try_below without release":      "count_add of reserved before it releases, and an LDAXR waits for that; C knows no such thing",
	"count_add without acquire":      "of a gate that is entered, the load after it acquires, and of a slot that is cleared, the store after it releases; C wants the total order of both sides of a gate",
	"clear reserved without release": "count_add of bound before it acquires, and fails where a repair came between; C lets the repair see the store all the same",
}

var tokens = []token{
	{"count_add", "c/count.h", "count_add", "__atomic_add_fetch(word, n, ORDER)"},
	{"count_read", "c/count.h", "count_read", "__atomic_load_n(word, ORDER)"},
	{"slot_reserved", "c/page.h", "slot_reserved", "__atomic_load_n(&s->reserved, ORDER)"},
	{"borrowed_for", "c/page.h", "borrowed_for", "__atomic_load_n(&s->borrowed, ORDER)"},
	{"ceiling nonce", "c/count.h", "account_ceiling_with", "uint64_t nonce = __atomic_load_n(&p->nonce, ORDER)"},
	{"ceiling limit first", "c/count.h", "account_ceiling_with", "return more_than(__atomic_load_n(&p->limit, ORDER), borrowed)"},
	{"ceiling", "c/count.h", "account_ceiling_with", "uint64_t ceiling = __atomic_load_n(&p->ceiling, ORDER)"},
	{"ceiling lost", "c/count.h", "account_ceiling_with", "__atomic_load_n(&a->usage->settled, ORDER)"},
	{"ceiling settled", "c/count.h", "account_ceiling_with", "__atomic_load_n(&p->settled, ORDER)"},
	{"ceiling again", "c/count.h", "account_ceiling_with", "again = __atomic_load_n(&p->ceiling, ORDER)"},
	{"ceiling now", "c/count.h", "account_ceiling_with", "now = __atomic_load_n(&p->nonce, ORDER)"},
	{"ceiling limit", "c/count.h", "account_ceiling_with", "limit = more_than(__atomic_load_n(&p->limit, ORDER), borrowed)"},
	{"borrows", "c/count.h", "account_borrowed", "__atomic_load_n(&a->usage->borrows, ORDER)"},
	{"reserve_idle look", "c/count.h", "reserve_idle", "was = __atomic_load_n(&a->slot->idle, ORDER)"},
	{"reserve_idle", "c/count.h", "reserve_idle", "__atomic_compare_exchange_n(&a->slot->idle, &was, was + STEP - n / UNIT, false, ORDER)"},
	{"empty_idle", "c/count.c", "empty_idle", "__atomic_compare_exchange_n(&s->idle, &was, (was & ~(STEP - 1)) + STEP, false, ORDER)"},
	{"clear committed", "c/count.c", "clear", "c = __atomic_exchange_n(&s->committed, 0, ORDER)"},
	{"clear reserved", "c/count.c", "clear", "__atomic_store_n(&s->reserved, 0, ORDER)"},
	{"high", "c/count.c", "high", "__atomic_load_n(&a->usage->high, ORDER)"},
	{"repair", "c/count.c", "repair", "__atomic_compare_exchange_n(&a->usage->bound, &b, right, false, ORDER)"},
	{"take_slot look", "c/count.c", "take_slot", "old = __atomic_load_n(&a->usage->high, ORDER)"},
	{"take_slot", "c/count.c", "take_slot", "__atomic_compare_exchange_n(&a->usage->high, &old, (uint32_t)i + 1, false, ORDER)"},
	{"try_below", "c/count.c", "try_below", "__atomic_compare_exchange_n(&a->usage->bound, &b, next, false, ORDER)"},
	{"take_off", "c/loan.c", "take_off", "__atomic_compare_exchange_n(word, &was, was - some, false, ORDER)"},
	{"attempt_begin", "c/attempt.c", "attempt_begin", "__atomic_compare_exchange_n(at, &word, turn_of(a, word), false, ORDER)"},
	{"attempt_end", "c/attempt.c", "attempt_end", "__atomic_compare_exchange_n(at, &word, word >> 32 << 32, false, ORDER)"},
	{"gate_enter", "c/pool.c", "gate_enter", "__atomic_load_n(&g->closed, ORDER)"},
	{"gate_close", "c/pool.c", "gate_close", "__atomic_exchange_n(&g->closed, 1, ORDER)"},
	{"gate_open", "c/pool.h", "gate_open", "__atomic_store_n(&g->closed, 0, ORDER)"},
	{"page store", "page.go", "store", "ORDER(p.word(at), v)"},
}

// steps are what a function does, in the order in which the model does it.
var steps = []struct {
	file, function string
	does           []string
}{
	{"c/count.h", "bound_add", []string{"count_add(&a->usage->bound, STEP + n / UNIT)"}},
	{"c/count.h", "bound_sub", []string{"count_add(&a->usage->bound, STEP - n / UNIT)"}},
	{"c/count.h", "reserved_add", []string{"count_add(&a->slot->reserved, n)"}},
	{"c/count.h", "committed_add", []string{"count_add(&a->slot->committed, n)"}},
	{"c/count.h", "account_return", []string{"bound_sub(a, n)", "reserved_sub(a, n)"}},
	{"c/count.h", "account_cancel", []string{"count_add(&a->slot->idle, STEP + n / UNIT)", "reserved_sub(a, n)"}},
	{"c/count.h", "reserve_idle", []string{"__atomic_load_n(&a->slot->idle", "reserved_add(a, n)", "__atomic_compare_exchange_n(&a->slot->idle"}},
	{"c/count.h", "account_reserve_quickly", []string{"reserve_idle(a, n)", "account_try(a, n, 0)", "count_read(&a->usage->bound)", "account_ceiling(a)", "bound_sub(a, n)", "reserved_sub(a, n)"}},
	{"c/count.h", "account_lost", []string{"committed_sub(a, n)", "count_add(&a->usage->settled, n)", "account_return(a, n)"}},
	{"c/count.h", "account_ceiling", []string{"account_ceiling_with(a, account_borrowed(a))"}},
	{"c/count.h", "account_ceiling_with", []string{"&p->nonce", "&p->limit", "&p->ceiling", "&a->usage->settled", "&p->settled", "&p->ceiling", "&p->nonce", "&p->limit"}},
	{"c/count.c", "empty_idle", []string{"was = count_read(&s->idle)", "__atomic_compare_exchange_n(&s->idle"}},
	{"c/count.c", "try_below", []string{"reserved_add(a, n)", "b = count_read(&a->usage->bound)", "ceiling(a)", "__atomic_compare_exchange_n(&a->usage->bound"}},
	{"c/count.c", "sum", []string{"high(a)", "count_read(&s->idle)", "slot_committed(s)", "slot_reserved(s)", "count_read(&s->idle)", "after != before"}},
	{"c/count.c", "repair", []string{"count_read(&a->usage->bound)", "sum(a)", "__atomic_compare_exchange_n(&a->usage->bound"}},
	{"c/count.c", "reclaim", []string{"empty_idle(", "repair(a)"}},
	{"c/count.c", "reap", []string{"take_lock(a, i)", "clear(a, s)", "sys_close(fd)"}},
	{"c/count.c", "clear", []string{"c = __atomic_exchange_n(&s->committed", "count_add(&a->usage->settled, c)", "bound_sub(a, c)", "__atomic_store_n(&s->reserved, 0"}},
	{"c/count.c", "take_slot", []string{"take_lock(a, i)", "__atomic_compare_exchange_n(&a->usage->high", "a->slot = s"}},
	{"c/count.c", "inquire", []string{"count_read(&a->page->done) >= h->after + 1", "ask_reading(a, h)"}},
	{"c/count.c", "ask_reading", []string{"h->after = count_read(&a->page->begun)", "count_add(&a->usage->asks, 1)"}},
	{"c/loan.c", "take_off", []string{"count_read(word)", "__atomic_compare_exchange_n(word"}},
	{"c/loan.c", "account_repay", []string{"take_off(&a->slot->borrowed, n)", "bound_sub(a, n)", "reserved_sub(a, n)", "hand_back(a)"}},
	{"c/loan.c", "hand_back", []string{"account_uncommit(b, some)", "account_return(b, some)"}},
	{"c/attempt.c", "attempt_begin", []string{"count_read(at)", "__atomic_compare_exchange_n(at"}},
	{"c/attempt.c", "attempt_end", []string{"count_read(at)", "__atomic_compare_exchange_n(at"}},
	{"c/pool.c", "gate_enter", []string{"count_add(", "&g->closed"}},
	{"c/pool.c", "gate_close", []string{"&g->closed, 1", "count_read(&g->flight)"}},
	{"page.go", "publish", []string{"p.store(atNonce, writing)", "p.store(atCeiling", "p.store(atSettled", "p.store(atNonce, r.nonce)"}},
	{"page.go", "writeLimit", []string{"page.store(atNonce, writing)", "page.store(atLimit", "page.publish(c)"}},
	{"meter.go", "Begin", []string{"m.page.store(atBegun"}},
	{"meter.go", "End", []string{"m.usage.Read()", "m.page.publish(next)", "m.page.store(atDone"}},
	{"usage.go", "Read", []string{"u.readAt(head, 0)", "u.readSome("}},
}

// outside are the places with an order that the model lacks, and why.
var outside = []struct{ file, text, why string }{
	{"c/count.h", "__atomic_sub_fetch(word, n", "of a slot's managed, promised and contexts, and of words of one process: no step of the proofs"},
	{"c/count.h", "return __atomic_load_n(&a->page->ceiling", "account_last_ceiling: whether to ask the driver again"},
	{"c/page.h", "__atomic_load_n(&s->others_reserved", "changed by processes of an earlier library, on x86-64 alone"},
	{"c/page.h", "__atomic_load_n(&s->committed", "as reserved, and for readings"},
	{"c/page.h", "__atomic_load_n(&s[i].idle", "idle_in: for views"},
	{"c/count.c", "__atomic_store_n(&s->borrowed, 0", "end_loans: under the slot's kernel lock"},
	{"c/count.c", "__atomic_store_n(&s->managed, 0", "for readings"},
	{"c/count.c", "__atomic_store_n(&s->promised, 0", "for readings"},
	{"c/count.c", "__atomic_store_n(&s->expected, 0", "for readings"},
	{"c/count.c", "__atomic_store_n(&s->exported, 0", "for readings"},
	{"c/count.c", "__atomic_store_n(&s->contexts, 0", "for readings"},
	{"c/count.c", "__atomic_store_n(&s->pid", "for readings, and for who waits for a death"},
	{"c/count.c", "__atomic_store_n(&s->lends, 0", "under the slot's kernel lock"},
	{"c/count.c", "__atomic_compare_exchange_n(at, &word, word >> 32 << 32", "end_turn: under the slot's kernel lock"},
	{"c/count.c", "__atomic_load_n(&a->page->usage", "account_open: written before the container starts"},
	{"c/count.c", "&p->limit, __ATOMIC_RELAXED), ceiling = __atomic_load_n(&p->ceiling, __ATOMIC_ACQUIRE)", "ceiling_alone: at most the limit, whatever is read"},
	{"c/count.c", "account_reading_is_ours(a, __atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE))", "ceiling_alone: likewise"},
	{"c/count.c", "limit = __atomic_load_n(&a->page->limit, __ATOMIC_ACQUIRE);", "account_exports_gone: gives no room"},
	{"c/count.c", "__atomic_compare_exchange_n(&a->slot->exported", "account_exports_gone: gives no room"},
	{"c/count.c", "stamp = __atomic_load_n(&p->stamp", "fresh: whether to wait"},
	{"c/count.c", "__atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE) == a->nonce;", "fresh, beyond: whether to wait; account_used: for views"},
	{"c/count.c", "stamp = __atomic_load_n(&p->roof_stamp", "beyond: whether to wait"},
	{"c/count.c", "__atomic_load_n(&a->page->every_ms", "whether to wait"},
	{"c/count.c", "__atomic_store_n(&a->waited", "whether to wait"},
	{"c/count.c", "done = __atomic_load_n(word", "await_reading: what to wait on"},
	{"c/count.c", "__atomic_compare_exchange_n(&a->usage->unmeasured", "whether to wait"},
	{"c/count.c", "__atomic_compare_exchange_n(&a->usage->unread", "whether to charge a guess"},
	{"c/count.c", "__atomic_exchange_n(&a->usage->unread", "likewise"},
	{"c/count.c", "__atomic_load_n(&b->page->limit", "account_limit: for views, and for a refusal"},
	{"c/count.c", "contend(a, n, __atomic_load_n(&a->page->limit", "whether to wait"},
	{"c/count.c", "uint64_t limit = __atomic_load_n(&p->limit, __ATOMIC_ACQUIRE);", "account_used: for views"},
	{"c/count.c", "if (__atomic_load_n(&p->nonce", "account_used: for views"},
	{"c/count.c", "__atomic_load_n(&p->shown", "account_used: for views"},
	{"c/loan.c", "__atomic_store_n(&b->slot->lends, 1", "before the slot is used"},
}

func read(file string) (string, error) {
	data, err := os.ReadFile(filepath.Join(folder, file))
	return string(data), err
}

// body returns a function's text, from the line that begins its definition.
func body(text, function string) (string, error) {
	start := regexp.MustCompile(`(?m)^[a-zA-Z].*\b` + function + `\(.*[^;\n]$`).FindStringIndex(text)
	if start == nil {
		return "", fmt.Errorf("there is no function %s", function)
	}
	rest := text[start[0]:]
	if line, _, _ := strings.Cut(rest, "\n"); strings.HasSuffix(line, "}") {
		return line, nil
	}
	end := strings.Index(rest, "\n}")
	if end < 0 {
		return "", fmt.Errorf("function %s has no end", function)
	}
	return rest[:end], nil
}

// order finds the order that a token states.
func (t token) order() (order, error) {
	text, err := read(t.file)
	if err != nil {
		return order{}, err
	}
	in, err := body(text, t.function)
	if err != nil {
		return order{}, fmt.Errorf("%s: %w", t.file, err)
	}
	expr := strings.Replace(regexp.QuoteMeta(t.text), "ORDER", `([\w., ]+)`, 1)
	found := regexp.MustCompile(expr).FindAllStringSubmatch(in, -1)
	if len(found) != 1 {
		return order{}, fmt.Errorf("%s: %s has %d times %q, want once: does the model still say what the source does?", t.file, t.function, len(found), t.text)
	}
	var o order
	for _, word := range strings.Split(found[0][1], ", ") {
		switch strings.TrimSpace(word) {
		case "__ATOMIC_RELAXED":
		case "__ATOMIC_ACQUIRE":
			o.acquire = true
		case "__ATOMIC_RELEASE":
			o.release = true
		case "__ATOMIC_ACQ_REL":
			o.acquire, o.release = true, true
		case "__ATOMIC_SEQ_CST":
			o = order{acquire: true, release: true, total: true}
		case "atomic.StoreUint64":
			o.release = true
		default:
			return order{}, fmt.Errorf("%s: %s states the order %q, which is none", t.file, t.function, word)
		}
	}
	// Arm has one kind of each: a load releases nothing, a store acquires nothing, and an
	// exclusive load that acquires waits for releases before it.
	switch {
	case strings.Contains(t.text, "__atomic_load_n"):
		o.release = false
	case strings.Contains(t.text, "_store_n") || strings.HasPrefix(t.text, "ORDER"):
		o.acquire, o.total = false, false
	default:
		o.total = o.acquire
	}
	return o, nil
}

// less are a token's orders with a part taken out, by what that is.
func (t token) less(o order) map[string]order {
	all := map[string]order{}
	if o.acquire {
		all["acquire"] = order{release: o.release}
	}
	if o.release {
		all["release"] = order{acquire: o.acquire, total: o.total}
	}
	if o.total && strings.Contains(t.text, "__atomic_load_n") {
		all["its place after releases"] = order{acquire: true}
	}
	return all
}
