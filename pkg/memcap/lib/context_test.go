// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

// contextOf is what an allocation's page says that a context takes.
func contextOf(t *testing.T, p *Pages, key string) uint64 {
	t.Helper()
	page, err := mapPage(filepath.Join(p.dir, key, string(aGPU)))
	if err != nil {
		t.Fatal(err)
	}
	defer page.unmap()
	return page.load(atContext)
}

// TestNeighboursModulesAreNotCharged: one tenant loads modules of 700 MiB. Another
// that begins after it has been read is charged for contexts as if it were alone:
// its second process has a context within 1 GiB.
func TestNeighboursModulesAreNotCharged(t *testing.T) {
	const other = "fedcba9876543210"
	heavy := newTenant(t)
	heavy.lives()
	pages, m := aMeter(t, heavy, time.Second)
	heavy.has(1, 512<<20, 512<<20, 1)
	for range 3 {
		if r := readOnce(t, m, 1000<<20, true); !r.Quiet {
			t.Fatalf("%+v is not quiet", r)
		}
	}
	if _, err := pages.Write(other, time.Second, []Limit{{GPU: aGPU, Bytes: aGiB}}); err != nil {
		t.Fatal(err)
	}
	if got := contextOf(t, pages, other); got > DefaultContext {
		t.Errorf("the neighbour's contexts count %d MiB each", got>>20)
	}
	if got := contextOf(t, pages, aKey); got > DefaultContext {
		t.Errorf("its own count %d MiB each: the modules are not the contexts'", got>>20)
	}

	light := newTenant(t)
	light.lives()
	light.isOf(pages, other)
	light.has(1, 512<<20, 512<<20, 1)
	n, err := pages.Meter(other, aGPU, light.usage())
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	r := readOnce(t, n, 300<<20, true)
	if each := contextOf(t, pages, other); each != 300<<20 || r.Used+each > aGiB {
		t.Errorf("with %d MiB used a second context is to take %d MiB: it does not fit 1 GiB", r.Used>>20, each>>20)
	}
}

// TestContextEstimate: of the readings of an allocation the one with the least for each
// context counts, and the estimate goes back to the default as time passes.
func TestContextEstimate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newTenant(t)
		p.lives()
		pages, m := aMeter(t, p, time.Second)
		want := func(mib uint64, what string) {
			t.Helper()
			if got := contextOf(t, pages, aKey); got != mib<<20 {
				t.Errorf("%s: a context counts %d MiB, want %d", what, got>>20, mib)
			}
		}
		read := func(driver uint64) { readOnce(t, m, driver<<20, true) }
		want(512, "before any reading")
		p.has(1, 512<<20, 512<<20, 1)
		read(900)
		want(512, "first read with modules in it")
		read(300)
		want(300, "read without them")
		read(1000)
		want(300, "read with others")
		time.Sleep(100 * estimateBack)
		read(1000)
		want(400, "a while later, still with them")
		read(330)
		want(330, "the next one is read as it began")
		time.Sleep(20 * estimateBack)
		read(340)
		want(340, "it never is more than there is")
		read(3)
		want(64, "nonsense")
		p.has(2, 0, 0, 0)
		time.Sleep(24 * time.Hour)
		read(0)
		want(512, "a day with no context")
		if _, err := pages.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: aGiB}}); err != nil {
			t.Fatal(err)
		}
		p.has(3, 512<<20, 512<<20, 1)
		read(310)
		if _, err := pages.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: 2 * aGiB}}); err != nil {
			t.Fatal(err)
		}
		want(310, "after its page was written again")
	})
}
