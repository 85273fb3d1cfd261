// SPDX-License-Identifier: Apache-2.0

package compute

import "testing"

func TestShareFollowsTheMemory(t *testing.T) {
	mps := func(factor float64, most int) Sharing { return Sharing{MPS: true, Factor: factor, Max: most} }
	for _, c := range []struct {
		s    Sharing
		part float64
		want int
	}{
		{Sharing{}, 0.5, 0},
		{mps(0, 0), 20.0 / 79, 26}, // 25.3
		{mps(2, 80), 20.0 / 79, 51},
		{mps(2, 80), 60.0 / 79, 80},
		{mps(1, 0), 1, 100},
		{mps(1, 0), 20.0 / 80, 25}, // exactly a quarter
		{mps(1, 0), 1.0 / 3, 34},
		{mps(3, 0), 1.0 / 3, 100},
		{mps(0.1, 0), 1.0 / 79, 1},
		{mps(1, 0), 0, 0},
	} {
		if err := c.s.Check(); err != nil {
			t.Errorf("%v: %v", c.s, err)
		}
		if got := c.s.Share(c.part).Ceiling; got != c.want {
			t.Errorf("%v of %v: %d percent, want %d", c.part, c.s, got, c.want)
		}
	}
	for _, s := range []Sharing{{Factor: 2}, {Max: 5}, mps(0.05, 0), mps(101, 0), mps(-1, 0), mps(1, 101), mps(1, -1)} {
		if s.Check() == nil {
			t.Errorf("%+v was accepted", s)
		}
	}
}

// A quarter of n units is 25 percent, and n parts of a GPU never have more than 100 and one percent
// for each by rounding.
func TestSharesOfEqualParts(t *testing.T) {
	s := Sharing{MPS: true}
	for n := 1; n <= MostClients; n++ {
		got := s.Share(1 / float64(n)).Ceiling
		if want := (100 + n - 1) / n; got != want {
			t.Errorf("one of %d: %d percent, want %d", n, got, want)
		}
	}
}

func TestNormal(t *testing.T) {
	for _, s := range []Sharing{{MPS: true}, {MPS: true, Factor: 1}, {MPS: true, Max: 100}, {MPS: true, Factor: 1, Max: 100}} {
		if s.Normal() != (Sharing{MPS: true}) {
			t.Errorf("%+v is %+v", s, s.Normal())
		}
	}
	if s := (Sharing{MPS: true, Factor: 2, Max: 80}); s.Normal() != s {
		t.Errorf("%+v is %+v", s, s.Normal())
	}
}

func TestInfer(t *testing.T) {
	mps, twice, half := Sharing{MPS: true}, Sharing{MPS: true, Factor: 2}, Sharing{MPS: true, Max: 50}
	for _, c := range []struct {
		most  int
		parts int
		wish  Sharing
		want  Sharing
	}{
		{0, 0, mps, Sharing{}},       // containers took turns
		{0, 4, Sharing{}, Sharing{}}, // and shall
		{25, 0, Sharing{}, mps},      // nothing is wanted, or turns
		{25, 0, twice, twice},        // the wish lets a container have that
		{25, 0, half, half},
		{60, 0, half, mps}, // it does not
		{25, 4, mps, mps},
		{25, 4, twice, twice},
		{50, 4, mps, twice},
		{50, 4, Sharing{}, twice},
	} {
		if got := Infer(Share{c.most}, c.parts, c.wish); got != c.want {
			t.Errorf("%d percent of %d parts, wished %v: %v, want %v", c.most, c.parts, c.wish, got, c.want)
		}
	}
	// Whatever was given, the layout lets a container have it.
	for parts := range MostClients + 1 {
		for most := 1; most <= 100; most++ {
			if got := Infer(Share{most}, parts, Sharing{}); got.Check() != nil || got.Largest(parts).Ceiling < most {
				t.Errorf("%d percent of %d parts: %v", most, parts, got)
			}
		}
	}
}

func TestVerify(t *testing.T) {
	share := Share{Ceiling: 26}
	client := Process{PID: 7, Client: true, SMs: 34}
	for _, c := range []struct {
		name    string
		s       Share
		all     int
		trouble string
		of      []Process
		want    string
	}{
		{"held", share, 132, "", []Process{client}, "ceiling 26 %"},
		{"exactly", share, 132, "", []Process{{8, true, 35}}, "ceiling 26 %"},
		{"turns", Share{}, 132, "", []Process{client}, "none: containers take turns"},
		{"daemon", share, 132, "the daemon is dead", []Process{client}, "none: the daemon is dead"},
		{"nobody", share, 132, "", nil, "none: no process yet"},
		{"unknown", share, 0, "", []Process{client}, "none: the driver does not tell how many SMs the GPU has"},
		{"outside", share, 132, "", []Process{client, {9, false, 34}}, "none: process 9 is no client of MPS"},
		{"silent", share, 132, "", []Process{{9, true, 0}}, "none: process 9 has not said how many SMs it has"},
		{"too many", share, 132, "", []Process{client, {9, true, 36}},
			"none: process 9 has 36 SMs, and its share is 35 of 132"},
	} {
		if got := Verify(c.s, c.all, c.trouble, c.of).String(); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}
