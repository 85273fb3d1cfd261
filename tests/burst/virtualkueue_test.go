// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/kueue"
)

// What Kueue has of each site: a flavor, and the check that it is for.
var (
	flavorOf = [...]string{OnPrem: "on-prem-a100-sxm4-80gb-mixed", Cloud: "cloud-a100-sxm4-80gb-mixed"}
	checkOf  = [...]string{OnPrem: "gpu-placer", Cloud: "gpu-placer-cloud"}
)

// queue is Kueue 0.19 with one ClusterQueue (BestEffortFIFO, no preemption), as far as a Job of one pod can tell:
// pkg/cache/queue/cluster_queue.go, inadmissible_workloads.go, pkg/scheduler/scheduler.go and the two reconcilers of
// workloads and jobs.
type queue struct {
	w *world
	// heap are the workloads that are tried, the first of them next, and parked those that found no quota.
	heap, parked []*task
	// barren are the kinds of workloads that found no quota since some was given back.
	barren map[string]bool
	// used has the workloads that have quota, by site.
	used [2][]*task
	// busy says that a cycle goes on, and retries that parked ones are tried soon.
	busy, retries bool
}

const (
	// cycle is how long the scheduler takes for a workload, and batch what it gathers quota for that is given back.
	cycle = 5 * time.Millisecond
	batch = time.Second

	allowedFlavors = "kueue.x-k8s.io/workload-allowed-resource-flavors"
)

// second is now as the API server writes it.
func second() metav1.Time { return metav1.NewTime(time.Now().Truncate(time.Second)) }

// kind is what makes workloads alike (workload.SchedulingHash).
func (k *task) kind() string {
	allowed, limited := k.Metadata.Annotations[allowedFlavors]
	return fmt.Sprint(k.Resource, k.Count, allowed, limited)
}

// since orders workloads (workload.Ordering).
func (k *task) since() time.Time {
	if c, evicted := k.condition("Evicted"); evicted {
		return c.LastTransitionTime
	}
	return k.created
}

// waits says that a workload may not be tried yet.
func (k *task) waits() bool {
	c, yes := k.condition("Requeued")
	return c.Type != "" && !yes || k.Status.RequeueState != nil && time.Now().Before(k.Status.RequeueState.RequeueAt)
}

// update is ClusterQueue.PushOrUpdate. A parked workload is tried again only where its condition Requeued has changed.
func (q *queue) update(k *task, requeued bool) {
	if k.is("QuotaReserved") || k.is("Finished") || slices.Contains(q.heap, k) {
		return
	}
	if i := slices.Index(q.parked, k); i >= 0 {
		if !requeued {
			return
		}
		q.parked = slices.Delete(q.parked, i, i+1)
	}
	if k.waits() || q.barren[k.kind()] {
		q.parked = append(q.parked, k)
		return
	}
	q.heap = append(q.heap, k)
	q.next()
}

// next begins a cycle if there is something to try.
func (q *queue) next() {
	if q.busy || len(q.heap) == 0 {
		return
	}
	q.busy = true
	q.w.after(cycle, func() { q.busy = false; q.schedule(); q.next() })
}

// schedule tries the first workload: it gets quota of the first flavor that it may have and that has some.
func (q *queue) schedule() {
	slices.SortStableFunc(q.heap, func(x, y *task) int {
		return cmp.Or(x.since().Compare(y.since()), cmp.Compare(x.Name, y.Name))
	})
	k := q.heap[0]
	q.heap = q.heap[1:]
	allowed, limited := k.Metadata.Annotations[allowedFlavors]
	for site, flavor := range flavorOf {
		if limited && !slices.Contains(strings.Split(allowed, ","), flavor) || !q.fits(Site(site), k) {
			continue
		}
		q.used[site] = append(q.used[site], k)
		q.w.after(q.w.writes, func() { q.reserved(k, Site(site)) })
		return
	}
	if q.barren == nil {
		q.barren = map[string]bool{}
	}
	q.barren[k.kind()] = true
	alike := func(x *task) bool { return x.kind() == k.kind() }
	for _, x := range q.heap {
		if alike(x) {
			q.parked = append(q.parked, x)
		}
	}
	q.heap = slices.DeleteFunc(q.heap, alike)
	q.parked = append(q.parked, k)
}

// fits reports whether a site's flavor has quota, as the export writes it: of memory, and of each resource.
func (q *queue) fits(site Site, k *task) bool {
	b := newBoard()
	if site == Cloud {
		b.quota[""] = cloudLimit
		for kind := range Own {
			for _, p := range pieces[kind] {
				b.quota[p.Resource] = cloudLimit * p.Count / p.GiB
			}
		}
	}
	for _, other := range q.used[site] {
		b.quota[""] -= other.GiB
		b.quota[other.Resource] -= other.Count
	}
	return b.admits(k.Piece)
}

// reserved writes down that a workload has quota. Its checks are those that it had before until they are next looked
// at.
func (q *queue) reserved(k *task, site Site) {
	k.set("QuotaReserved", true, "QuotaReserved")
	if _, was := k.condition("Evicted"); was {
		k.set("Evicted", false, "QuotaReserved")
	}
	k.Status.Admission = &struct {
		PodSetAssignments []struct{ Flavors map[string]string }
	}{[]struct{ Flavors map[string]string }{{map[string]string{"example.com/gpu-memory": flavorOf[site]}}}}
	k.told()
}

// sync gives a workload the checks of its flavor, and no others; without quota it has none
// (reconcileSyncAdmissionChecks).
func (q *queue) sync(k *task) (changed bool) {
	want := ""
	if k.is("QuotaReserved") {
		want = checkOf[k.site()]
	}
	if len(k.checks) == 1 && k.checks[0].Name == want || len(k.checks) == 0 && want == "" {
		return false
	}
	if k.checks = nil; want != "" {
		k.checks = []kueue.CheckState{{Name: want, State: kueue.Pending, LastTransitionTime: second()}}
	}
	k.told()
	return true
}

// reconcile does the next thing that a workload needs.
func (q *queue) reconcile(k *task) {
	state := func(s string) bool {
		return slices.ContainsFunc(k.checks, func(c kueue.CheckState) bool { return c.State == s })
	}
	switch {
	case k.is("Finished") || k.version == 0 || k.is("QuotaReserved") && q.sync(k):
	case k.is("QuotaReserved") && !k.is("Evicted") && state(kueue.Retry):
		q.evict(k)
	case k.is("QuotaReserved") && !k.is("Evicted") && !k.is("Admitted") && !state(kueue.Pending):
		k.set("Admitted", true, "Admitted")
		k.told()
		q.w.after(q.w.reacts, func() {
			if k.is("Admitted") && !k.is("Evicted") {
				k.start()
			}
		})
	case !k.is("QuotaReserved"):
		if c, yes := k.condition("Requeued"); c.Type != "" && !yes {
			if k.waitsUntil() > 0 {
				q.w.exactly(k.waitsUntil(), func() { q.reconcile(k) })
				return
			}
			k.Status.RequeueState = nil
			k.set("Requeued", true, "BackoffFinished")
			k.told()
			q.update(k, true)
			return
		}
		q.sync(k)
	}
}

// waitsUntil is how long a workload may not be tried yet.
func (k *task) waitsUntil() time.Duration {
	if k.Status.RequeueState == nil {
		return 0
	}
	return time.Until(k.Status.RequeueState.RequeueAt)
}

// evict takes a workload's quota away, once its pod has ended.
func (q *queue) evict(k *task) {
	k.set("Evicted", true, "AdmissionCheck")
	for i, c := range k.checks {
		if c.RequeueAfterSeconds != nil {
			later := time.Duration(*c.RequeueAfterSeconds) * time.Second
			k.Status.RequeueState = &struct{ RequeueAt time.Time }{time.Now().Add(later)}
		}
		k.checks[i] = kueue.CheckState{Name: c.Name, State: kueue.Pending, LastTransitionTime: second(),
			Message: "Reset to Pending after eviction", RequeueAfterSeconds: c.RequeueAfterSeconds}
	}
	k.told()
	q.w.after(q.w.reacts, func() {
		k.stop(func() {
			if k.is("Finished") {
				return
			}
			k.set("QuotaReserved", false, "Pending")
			if c, was := k.condition("Admitted"); was {
				k.past += int(time.Since(c.LastTransitionTime).Seconds())
			}
			k.set("Admitted", false, "NoReservation")
			k.set("Requeued", false, "AdmissionCheck")
			k.Status.Admission = nil
			q.parked = append(q.parked, k)
			k.told()
			q.release(k)
		})
	})
}

// release gives a workload's quota back. Those that are parked are tried again in a second.
func (q *queue) release(k *task) {
	for site := range q.used {
		q.used[site] = slices.DeleteFunc(q.used[site], func(x *task) bool { return x == k })
	}
	if q.retries {
		return
	}
	q.retries = true
	q.w.exactly(batch, func() {
		q.retries, q.barren = false, nil
		for _, x := range q.parked {
			if !x.waits() {
				q.heap = append(q.heap, x)
			}
		}
		q.parked = slices.DeleteFunc(q.parked, func(x *task) bool { return !x.waits() })
		q.next()
	})
}
