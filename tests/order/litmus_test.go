// SPDX-License-Identifier: Apache-2.0

package order

import (
	"strconv"
	"strings"
	"testing"
)

type litmus struct {
	name    string
	threads []string
	outcome string
	allowed bool
}

// TestLitmus holds the machine to what Arm's memory model says of the tests by which such
// models are told apart. A thread is written as accesses: Wx=1 is a store, WLx=1 an STLR, Rx
// a load, RAx an LDAR, RQx an LDAPR, F a DMB ISH; U, UA, UL, UAL updates by LDXR or LDAXR and
// STXR or STLXR that add to a word. After a comma: data or ctrl, a dependency on the last
// read. The outcome is what registers (0:0 is the first read of the first thread) and words
// have in the end.
func TestLitmus(t *testing.T) {
	for _, l := range []litmus{
		{"MP", []string{"Wx=1 Wy=1", "Ry Rx"}, "1:0=1 1:1=0", true},
		{"MP+popl+po", []string{"Wx=1 WLy=1", "Ry Rx"}, "1:0=1 1:1=0", true},
		{"MP+po+poap", []string{"Wx=1 Wy=1", "RAy Rx"}, "1:0=1 1:1=0", true},
		{"MP+popl+poap", []string{"Wx=1 WLy=1", "RAy Rx"}, "1:0=1 1:1=0", false},
		{"MP+popl+poqp", []string{"Wx=1 WLy=1", "RQy Rx"}, "1:0=1 1:1=0", false},
		{"MP+dmb+dmb", []string{"Wx=1 F Wy=1", "Ry F Rx"}, "1:0=1 1:1=0", false},
		{"SB", []string{"Wx=1 Ry", "Wy=1 Rx"}, "0:0=0 1:0=0", true},
		{"SB+poll+poaa", []string{"WLx=1 RAy", "WLy=1 RAx"}, "0:0=0 1:0=0", false},
		{"SB+polq", []string{"WLx=1 RQy", "WLy=1 RQx"}, "0:0=0 1:0=0", true},
		{"SB+dmbs", []string{"Wx=1 F Ry", "Wy=1 F Rx"}, "0:0=0 1:0=0", false},
		{"SB+updates", []string{"UALx=1 Ry", "UALy=1 Rx"}, "0:1=0 1:1=0", true},
		{"SB+updates+lda", []string{"UALx=1 RAy", "UALy=1 RAx"}, "0:1=0 1:1=0", false},
		{"LB", []string{"Rx Wy=1", "Ry Wx=1"}, "0:0=1 1:0=1", true},
		{"LB+ctrls", []string{"Rx Wy=1,ctrl", "Ry Wx=1,ctrl"}, "0:0=1 1:0=1", false},
		{"LB+data+po", []string{"Rx Wy=1,data", "Ry Wx=1"}, "0:0=1 1:0=1", true},
		{"LB+poap+popl", []string{"RAx Wy=1", "Ry WLx=1"}, "0:0=1 1:0=1", false},
		{"S+popl+data", []string{"Wx=2 WLy=1", "Ry Wx=1,data"}, "1:0=1 x=2", false},
		{"S", []string{"Wx=2 Wy=1", "Ry Wx=1"}, "1:0=1 x=2", true},
		{"R", []string{"Wx=1 Wy=1", "Wy=2 Rx"}, "y=2 1:0=0", true},
		{"R+popl+lda", []string{"Wx=1 WLy=1", "WLy=2 RAx"}, "y=2 1:0=0", false},
		{"R+popl+po", []string{"Wx=1 WLy=1", "WLy=2 Rx"}, "y=2 1:0=0", true},
		{"2+2W", []string{"Wx=2 Wy=1", "Wy=2 Wx=1"}, "x=2 y=2", true},
		{"2+2W+popls", []string{"Wx=2 WLy=1", "Wy=2 WLx=1"}, "x=2 y=2", false},
		{"CoRR", []string{"Wx=1", "Rx Rx"}, "1:0=1 1:1=0", false},
		{"CoRW", []string{"Rx Wx=1"}, "0:0=1", false},
		{"CoWR", []string{"Wx=1 Rx", "Wx=2"}, "0:0=0", false},
		{"IRIW", []string{"Wx=1", "Wy=1", "Rx Ry", "Ry Rx"}, "2:0=1 2:1=0 3:0=1 3:1=0", true},
		{"IRIW+poaps", []string{"Wx=1", "Wy=1", "RAx Ry", "RAy Rx"}, "2:0=1 2:1=0 3:0=1 3:1=0", false},
		{"WRC+data+poap", []string{"Wx=1", "Rx Wy=1,data", "RAy Rx"}, "1:0=1 2:0=1 2:1=0", false},
		{"WRC+po+poap", []string{"Wx=1", "Rx Wy=1", "RAy Rx"}, "1:0=1 2:0=1 2:1=0", true},
		{"ISA2+popl+data+poap", []string{"Wx=1 WLy=1", "Ry Wz=1,data", "RAz Rx"}, "1:0=1 2:0=1 2:1=0", false},
		{"MP+popl+ctrl: reads are not held by it", []string{"Wx=1 WLy=1", "Ry Rx,ctrl"}, "1:0=1 1:1=0", true},
		{"PPOCA: a store that is not yet visible is read", []string{"Wx=1 WLy=1", "Ry Wz=1,ctrl Rz Rx"}, "1:0=1 1:1=1 1:2=0", true},
		{"MP+fri: an old value, then a new one", []string{"Wx=1 Wx=2", "Rx Rx"}, "1:0=2 1:1=1", false},
		{"two updates lose none", []string{"Ux=1", "Ux=1"}, "x=1", false},
		{"an update's write may be late", []string{"Wx=1 WLy=1", "UAy=2 Rx"}, "y=3 1:0=1 1:1=0", false},
		{"update, then a load", []string{"UAx=1 Ry", "Wy=1 F Rx"}, "0:1=0 1:0=0", true},
	} {
		bad := l.program().explore()
		if (bad != nil) != l.allowed {
			t.Errorf("%s: %s: allowed is %v, want %v\n%s", l.name, l.outcome, bad != nil, l.allowed, strings.Join(bad, "\n"))
		}
	}
}

// program parses a test. Its bad state is the outcome.
func (l litmus) program() program {
	p := program{name: l.name}
	for t, text := range l.threads {
		th := thread{name: strconv.Itoa(t)}
		last := ""
		for _, word := range strings.Fields(text) {
			a, reads := parse(word), ""
			if a.kind == load || a.kind == update {
				reads = strconv.Itoa(len(strings.Fields(last)))
				a.into = reads
			}
			if from := strings.Fields(last); strings.HasSuffix(word, ",data") {
				constant := a.value
				a.value = func(r *registers) int { return constant(r) + 0*r.of(from[len(from)-1]) }
			} else if strings.HasSuffix(word, ",ctrl") {
				a.when = func(r *registers) bool { return r.of(from[len(from)-1]) >= 0 }
			}
			if a.kind == update {
				n := a.value(nil)
				a.value = func(r *registers) int { return n + r.of(reads) }
			}
			if reads != "" {
				last += " " + reads
			}
			th.accesses = append(th.accesses, a)
		}
		p.threads = append(p.threads, th)
	}
	p.never = func(word, register func(string) int) bool {
		for _, is := range strings.Fields(l.outcome) {
			name, value, _ := strings.Cut(is, "=")
			v, _ := strconv.Atoi(value)
			got := word
			if strings.Contains(name, ":") {
				got, name = register, strings.Replace(name, ":", ".", 1)
			}
			if got(name) != v {
				return false
			}
		}
		return true
	}
	return p
}

func parse(word string) access {
	word, _, _ = strings.Cut(word, ",")
	a := access{kind: map[byte]kind{'R': load, 'W': store, 'U': update, 'F': fence}[word[0]]}
	for word = word[1:]; word != "" && strings.Contains("ALQ", word[:1]); word = word[1:] {
		a.order.acquire = a.order.acquire || word[0] != 'L'
		a.order.release = a.order.release || word[0] == 'L'
		a.order.total = a.order.total || word[0] == 'A'
	}
	at, value, _ := strings.Cut(word, "=")
	v, _ := strconv.Atoi(value)
	a.at, a.value = at, func(*registers) int { return v }
	return a
}
