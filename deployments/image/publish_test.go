// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/registry/remote/errcode"
)

const (
	publishedVersion = "v0.1.0-rc.1"
	publishedTag     = publishedVersion
	chartTag         = "0.1.0-rc.1"
)

// shop is a registry on the loopback that notes what is written to it.
type shop struct {
	*httptest.Server
	// meets comes before the registry, and says whether it has answered itself. Of a request that
	// writes, n is its number, from 1; of others it is 0.
	meets func(w http.ResponseWriter, r *http.Request, n int) bool

	mu     sync.Mutex
	n      int
	writes []string // kind, repository, and of a tag or a manifest its name
}

// openShop starts a registry. Tests do not see the user's own credentials.
func openShop(t *testing.T) *shop {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	s := &shop{}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := 0
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			s.mu.Lock()
			s.n++
			n = s.n
			s.mu.Unlock()
		}
		if s.meets != nil && s.meets(w, r, n) {
			return
		}
		inner.ServeHTTP(w, r)
		if n > 0 {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.writes = append(s.writes, kindOfRequest(r))
		}
	}))
	t.Cleanup(s.Close)
	return s
}

func kindOfRequest(r *http.Request) string {
	path := strings.TrimPrefix(r.URL.Path, "/v2/")
	if at, reference, ok := strings.Cut(path, "/manifests/"); ok {
		switch {
		case !strings.HasPrefix(reference, "sha256:"):
			return "tag " + at + " " + reference
		case r.Header.Get("Content-Type") == ocispec.MediaTypeImageIndex:
			return "index " + at + " " + reference
		}
		return "manifest " + at + " " + reference
	}
	at, _, _ := strings.Cut(path, "/blobs/")
	return "blob " + at
}

func (s *shop) host() string { return strings.TrimPrefix(s.URL, "http://") }

// at is a repository of the registry.
func (s *shop) at(path string) string { return s.host() + "/team/" + path }

// get reads what the registry has, and returns nil if it has nothing there.
func (s *shop) get(t *testing.T, repository, kind, reference string) []byte {
	t.Helper()
	answer, err := http.Get(s.URL + "/v2/team/" + repository + "/" + kind + "/" + reference)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	if answer.StatusCode == http.StatusNotFound {
		return nil
	}
	if answer.StatusCode != http.StatusOK {
		t.Fatalf("%s %s of %s: %s", kind, reference, repository, answer.Status)
	}
	return data
}

// tags are those of the three repositories, with what they name.
func (s *shop) tags(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for repository, tag := range map[string]string{"gpu-agent": publishedTag, "gpu-placer": publishedTag, "charts/gpu-agent": chartTag} {
		if data := s.get(t, repository, "manifests", tag); data != nil {
			all[repository] = fmt.Sprintf("sha256:%x", sha256.Sum256(data))
		}
	}
	return all
}

// small writes a release for this registry, of both architectures, with the real chart and programs of a
// few bytes. Other programs give it other digests.
func (s *shop) small(t *testing.T, programs string) string { return s.smallBy(t, programs, "") }

// smallBy is small, signed by the private key in a file; empty signs nothing.
func (s *shop) smallBy(t *testing.T, programs, key string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), publishedVersion)
	r := &release{
		source:       source{checkout: "../..", about: about{version: publishedVersion, revision: "abc", created: time.Date(2026, 11, 27, 1, 2, 3, 0, time.UTC)}},
		repositories: map[string]string{"gpu-agent": s.at("gpu-agent"), "gpu-placer": s.at("gpu-placer")},
		builder:      defaultBuilder, key: key, chartAt: s.at("charts/gpu-agent"),
	}
	digests := map[string]string{}
	for _, of := range products {
		var parts []*part
		for _, arch := range architectures {
			p := &part{product: of, arch: arch, files: tree{"usr/bin/" + of.name: {mode: 0o755, data: []byte(programs + of.name + arch)}}}
			var err error
			if p.image, err = r.about.image(p); err != nil {
				t.Fatal(err)
			}
			parts = append(parts, p)
		}
		index, err := r.about.index(parts)
		if err != nil {
			t.Fatal(err)
		}
		digest, err := index.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests[of.name] = digest.String()
		if err := errors.Join(writeArchive(filepath.Join(dir, archiveFile(of, publishedVersion)), index, r.about.created, r.repository(of)+":"+publishedVersion),
			r.addStatement(of, dir, digest.String(), parts),
			writeText(filepath.Join(dir, of.name+"-digest"), digest.String()+"\n")); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(r.addChart(t.Context(), dir, digests), checksums(dir)); err != nil {
		t.Fatal(err)
	}
	if key != "" {
		if err := r.sign(dir); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// publish publishes a release to this registry, by a client that tries nothing again.
func (s *shop) publish(ctx context.Context, dir string, change func(*publication)) (said string, err error) {
	var out strings.Builder
	p := publication{
		dir: dir, version: publishedVersion, chart: s.at("charts/gpu-agent"), out: &out, client: s.Client(),
		repositories: map[string]string{"gpu-agent": s.at("gpu-agent"), "gpu-placer": s.at("gpu-placer")},
	}
	if change != nil {
		change(&p)
	}
	err = p.run(ctx)
	return out.String(), err
}

func readText(t *testing.T, dir, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

// A release that `make publish` has pushed is there whole, by its digests: of each image both
// architectures, and the chart. Nothing got its tag before all was there. Pushing it again moves nothing.
func TestPublish(t *testing.T) {
	s := openShop(t)
	dir := s.small(t, "")
	bin := t.TempDir()
	publish := func() string {
		cmd := exec.CommandContext(t.Context(), "make", "--silent", "publish", "VERSION="+publishedVersion, "DIST="+dir, "REGISTRY="+s.at("")[:len(s.at(""))-1], "BIN="+bin)
		cmd.Dir = "../.."
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("make publish: %v\n%s", err, out)
		}
		return string(out)
	}
	said := publish()
	if ranks := []string{"blob", "manifest", "index", "tag"}; true {
		last := map[string]int{}
		tagged := false
		for _, w := range s.writes {
			kind, rest, _ := strings.Cut(w, " ")
			at, _, _ := strings.Cut(rest, " ")
			rank := slices.Index(ranks, kind)
			if tagged = tagged || kind == "tag"; rank < last[at] || tagged && kind != "tag" {
				t.Errorf("%q was pushed too late; in this order:\n%s", w, strings.Join(s.writes, "\n"))
				break
			}
			last[at] = rank
		}
	}
	if w := s.writes[len(s.writes)-1]; w != "tag team/charts/gpu-agent "+chartTag {
		t.Errorf("the last thing pushed is %q, want the chart's tag", w)
	}
	digests := map[string]string{
		"gpu-agent": readText(t, dir, "gpu-agent-digest"), "gpu-placer": readText(t, dir, "gpu-placer-digest"),
		"charts/gpu-agent": readText(t, dir, "gpu-agent-chart-digest"),
	}
	for repository, digest := range digests {
		tag := publishedTag
		if repository == "charts/gpu-agent" {
			tag = chartTag
		}
		if got := s.tags(t)[repository]; got != digest {
			t.Errorf("the tag of %s is %q, and the release says %s", repository, got, digest)
		}
		if want := s.at(repository) + ":" + tag + "@" + digest; !strings.Contains(said, want) {
			t.Errorf("it did not say %s:\n%s", want, said)
		}
	}
	for _, of := range products {
		t.Run(of.name, func(t *testing.T) { s.isArchive(t, of, dir, digests[of.name]) })
	}
	t.Run("chart", func(t *testing.T) { s.isChart(t, dir, digests["charts/gpu-agent"]) })

	before := len(s.writes)
	said = publish()
	if more := s.writes[before:]; len(more) > 0 || strings.Contains(said, "pushed ") || strings.Contains(said, "tagged ") {
		t.Errorf("pushed again, the registry got %q:\n%s", more, said)
	}
	if !strings.Contains(said, s.at("charts/gpu-agent")+":"+chartTag+"@"+digests["charts/gpu-agent"]) {
		t.Errorf("pushed again, it does not say what there is:\n%s", said)
	}
}

// isArchive holds the image that the registry has by a digest against the release's archive: every blob
// of the archive is there, and both architectures.
func (s *shop) isArchive(t *testing.T, of product, dir, digest string) {
	folder := t.TempDir()
	if out, err := exec.Command("tar", "-xf", filepath.Join(dir, archiveFile(of, publishedVersion)), "-C", folder).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var index ocispec.Index
	if err := json.Unmarshal(s.get(t, of.name, "manifests", digest), &index); err != nil {
		t.Fatal(err)
	}
	if got := platformsOf(index); got != "linux/amd64, linux/arm64" {
		t.Errorf("the index is of %q", got)
	}
	manifests := []string{digest}
	for _, m := range index.Manifests {
		manifests = append(manifests, m.Digest.String())
	}
	blobs, err := os.ReadDir(filepath.Join(folder, "blobs/sha256"))
	if err != nil || len(blobs) != 1+2*3 { // the index; of each architecture manifest, configuration and layer
		t.Fatalf("the archive has %d blobs, %v; want 7", len(blobs), err)
	}
	for _, b := range blobs {
		kind, name := "blobs", "sha256:"+b.Name()
		if slices.Contains(manifests, name) {
			kind = "manifests"
		}
		if got := string(s.get(t, of.name, kind, name)); got != readAll(t, filepath.Join(folder, "blobs/sha256", b.Name())) {
			t.Errorf("%s is another one in the registry: %q", name, got)
		}
	}
}

func readAll(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// isChart holds the chart that the registry has by a digest against the release's, as a blob and by Helm.
func (s *shop) isChart(t *testing.T, dir, digest string) {
	const repository = "charts/gpu-agent"
	want := readAll(t, filepath.Join(dir, chartFile(publishedVersion)))
	var manifest ocispec.Manifest
	if err := json.Unmarshal(s.get(t, repository, "manifests", digest), &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest.Layers) != 1 || manifest.Layers[0].MediaType != chartLayerType || manifest.Config.MediaType != chartConfigType {
		t.Fatalf("the manifest is no chart's: %+v", manifest)
	}
	if got := string(s.get(t, repository, "blobs", manifest.Layers[0].Digest.String())); got != want {
		t.Error("the registry has another chart than the release")
	}
	if got := manifest.Annotations[ocispec.AnnotationCreated]; got != "2026-11-27T01:02:03Z" {
		t.Errorf("the chart is of %s, want the commit's date", got)
	}
	helm := filepath.Join(cacheOf(t), "bin", "helm")
	if _, err := os.Stat(helm); err != nil {
		t.Skip("helm is not built: go run ./tests/stages node helm")
	}
	home := t.TempDir()
	for _, args := range [][]string{
		{"pull", "oci://" + s.at(repository), "--version", chartTag, "--destination", home},
		{"pull", "oci://" + s.at(repository) + "@" + digest, "--destination", filepath.Join(home, "by-digest")},
		{"template", "x", "oci://" + s.at(repository), "--version", chartTag, "--set", "placer.enabled=true"},
	} {
		cmd := exec.CommandContext(t.Context(), helm, append(args, "--plain-http")...)
		cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
		if args[0] == "pull" {
			if err := os.MkdirAll(args[len(args)-1], 0o755); err != nil {
				t.Fatal(err)
			}
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		if args[0] == "pull" {
			got, err := filepath.Glob(filepath.Join(args[len(args)-1], "*.tgz"))
			if err != nil || len(got) != 1 || readAll(t, got[0]) != want {
				t.Errorf("helm %s: got %q, %v, or another chart than the release's", strings.Join(args, " "), got, err)
			}
			continue
		}
		for _, of := range products {
			if image := "image: " + s.at(of.name) + "@" + readText(t, dir, of.name+"-digest") + "\n"; !bytes.Contains(out, []byte(image)) {
				t.Errorf("no object of the chart has %s", image)
			}
		}
	}
}

// Wherever a registry fails, no tag has less than the whole release behind it, and the next run goes on
// from there.
func TestRegistryFailsInTheMiddle(t *testing.T) {
	whole := openShop(t)
	if _, err := whole.publish(t.Context(), whole.small(t, ""), nil); err != nil {
		t.Fatal(err)
	}
	requests := whole.n
	tags := 0
	for _, w := range whole.writes {
		if strings.HasPrefix(w, "tag ") {
			tags++
		}
	}
	if tags != 3 || requests < 20 {
		t.Fatalf("a release took %d requests that write, %d of them for tags: this test looks at something else", requests, tags)
	}
	for failing := 1; failing <= requests; failing++ {
		s := openShop(t)
		dir := s.small(t, "")
		s.meets = func(w http.ResponseWriter, _ *http.Request, n int) bool {
			if n < failing {
				return false
			}
			if n > 0 {
				http.Error(w, "out of order", http.StatusInternalServerError)
			}
			return n > 0
		}
		_, err := s.publish(t.Context(), dir, nil)
		if err == nil || !strings.Contains(err.Error(), "response status code 500") || !strings.Contains(err.Error(), s.host()) {
			t.Fatalf("request %d failed, and publish said %v", failing, err)
		}
		s.meets = nil
		got, before := s.tags(t), max(0, failing-1-(requests-tags))
		if len(got) != before || got["charts/gpu-agent"] != "" {
			t.Fatalf("request %d of %d failed, and these tags are there: %v; want %d", failing, requests, got, before)
		}
		written := len(s.writes)
		if _, err := s.publish(t.Context(), dir, nil); err != nil {
			t.Fatalf("after request %d failed: %v", failing, err)
		}
		if got := s.tags(t); len(got) != 3 || got["charts/gpu-agent"] != readText(t, dir, "gpu-agent-chart-digest") {
			t.Errorf("after request %d failed, and a second run, the tags are %v", failing, got)
		}
		if len(s.writes) > requests+1 { // an upload that was begun is begun again
			t.Errorf("after request %d failed, the second run wrote %d times beside %d", failing, len(s.writes)-written, written)
		}
	}
}

// A registry that is busy once is asked again.
func TestBusyRegistry(t *testing.T) {
	s := openShop(t)
	s.meets = func(w http.ResponseWriter, _ *http.Request, n int) bool {
		if n == 2 { // the first blob's content
			http.Error(w, "busy", http.StatusServiceUnavailable)
		}
		return n == 2
	}
	if _, err := s.publish(t.Context(), s.small(t, ""), func(p *publication) { p.client = newClient() }); err != nil {
		t.Error(err)
	}
	if got := s.tags(t); len(got) != 3 {
		t.Errorf("the tags are %v", got)
	}
}

// What a published version is does not change, unless it is forced.
func TestVersionThatIsPublished(t *testing.T) {
	s := openShop(t)
	first, second := s.small(t, ""), s.small(t, "newer ")
	if _, err := s.publish(t.Context(), first, nil); err != nil {
		t.Fatal(err)
	}
	was, writes := s.tags(t), len(s.writes)
	_, err := s.publish(t.Context(), second, nil)
	if err == nil {
		t.Fatal("another release of the same version was published")
	}
	for _, want := range []string{
		s.at("gpu-agent:" + publishedTag + " is " + was["gpu-agent"] + " in the registry, and " + readText(t, second, "gpu-agent-digest") + " in the release"),
		s.at("gpu-placer:" + publishedTag + " is "), s.at("charts/gpu-agent:" + chartTag + " is "), "FORCE=1",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("it does not say %q: %v", want, err)
		}
	}
	if more := s.writes[writes:]; len(more) > 0 {
		t.Errorf("it was refused, and the registry got %q", more)
	}
	said, err := s.publish(t.Context(), second, func(p *publication) { p.force = true })
	if err != nil {
		t.Fatal(err)
	}
	for repository, digest := range s.tags(t) {
		if digest == was[repository] || !strings.Contains(said, "it was "+was[repository]) {
			t.Errorf("forced, %s is still %s, or it is not said:\n%s", repository, digest, said)
		}
	}
}

// A tag that a registry takes and does not keep is no success.
func TestTagThatDoesNotStay(t *testing.T) {
	s := openShop(t)
	s.meets = func(w http.ResponseWriter, r *http.Request, n int) bool {
		lost := n > 0 && strings.HasPrefix(kindOfRequest(r), "tag team/gpu-placer ")
		if lost {
			w.WriteHeader(http.StatusCreated)
		}
		return lost
	}
	_, err := s.publish(t.Context(), s.small(t, ""), nil)
	if want := "tag " + s.at("gpu-placer:"+publishedTag) + ": the registry took "; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	if got := s.tags(t); got["charts/gpu-agent"] != "" {
		t.Errorf("the chart has a tag, and an image that it names has none: %v", got)
	}
}

// credential writes what `docker login` would.
func (s *shop) credential(t *testing.T, user, password string) (file string) {
	t.Helper()
	file = filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json")
	text := fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, s.host(), base64.StdEncoding.EncodeToString([]byte(user+":"+password)))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// Credentials come from Docker's config file. Where they are wrong, missing, or not enough, the error says
// which file and what to do, and has nothing of them, though the registry repeats them.
func TestCredentials(t *testing.T) {
	const user, right, wrong = "robot", "correct-horse", "battery-staple"
	for _, test := range []struct {
		name, password string
		// readOnly: every user can look, and none but robot with the right password can push.
		readOnly bool
		says     []string
	}{
		{name: "right", password: right},
		{name: "wrong", password: wrong, says: []string{"401", "does not let the user push", "docker login"}},
		{name: "none", says: []string{"has no credentials for it", "docker login"}},
		{name: "not enough", password: wrong, readOnly: true, says: []string{"403", "you are", "does not let the user push", "docker login"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := openShop(t)
			file := filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json")
			if test.password != "" {
				s.credential(t, user, test.password)
			}
			s.meets = func(w http.ResponseWriter, r *http.Request, n int) bool {
				_, password, _ := r.BasicAuth()
				switch {
				case password == right || test.readOnly && n == 0:
					return false
				case test.readOnly && password != "":
					w.WriteHeader(http.StatusForbidden)
					fmt.Fprintf(w, `{"errors": [{"code": "DENIED", "message": "you are %s, with %s\u001b[2J"}]}`, password, r.Header.Get("Authorization"))
				default:
					w.Header().Set("Www-Authenticate", `Basic realm="shop"`)
					w.WriteHeader(http.StatusUnauthorized)
				}
				return true
			}
			said, err := s.publish(t.Context(), s.small(t, ""), nil)
			s.meets = nil
			text := said + fmt.Sprint(err)
			for _, secret := range []string{test.password, base64.StdEncoding.EncodeToString([]byte(user + ":" + test.password))} {
				if test.password != "" && strings.Contains(text, secret) || strings.Contains(text, "\x1b") {
					t.Errorf("it tells the password, or moves the cursor:\n%q", text)
				}
			}
			if test.says == nil {
				if err != nil || len(s.tags(t)) != 3 {
					t.Errorf("got %v, with the tags %v", err, s.tags(t))
				}
				return
			}
			for _, want := range append(test.says, s.host(), file) {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("it does not say %q: %v", want, err)
				}
			}
			if len(s.writes) > 0 {
				t.Errorf("the registry got %q", s.writes)
			}
		})
	}
}

// Where a registry puts a signature into the URL of an upload, no error has it.
func TestSignedUploads(t *testing.T) {
	s := openShop(t)
	s.meets = func(w http.ResponseWriter, r *http.Request, n int) bool {
		switch {
		case n == 0:
			return false
		case r.Method == http.MethodPost:
			w.Header().Set("Location", r.URL.Path+"1?_state=signature")
			w.WriteHeader(http.StatusAccepted)
		default:
			w.WriteHeader(http.StatusInsufficientStorage)
		}
		return true
	}
	_, err := s.publish(t.Context(), s.small(t, ""), nil)
	var answer *errcode.ErrorResponse
	if !errors.As(err, &answer) || answer.StatusCode != http.StatusInsufficientStorage || answer.URL.Query().Get("_state") != "signature" {
		t.Fatalf("got %v, want what the registry has answered", err)
	}
	if text := err.Error(); strings.Contains(text, "signature") || !strings.Contains(text, "507") || !strings.Contains(text, "/blobs/uploads/1") {
		t.Errorf("it says %s", text)
	}
}

// Nothing is pushed of a folder that is not the release that it was, or that is of another registry.
func TestNotThisRelease(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(t *testing.T, s *shop, dir string, p *publication)
		says   string
	}{
		{"no version", func(_ *testing.T, _ *shop, _ string, p *publication) { p.version = "latest" }, "is no semantic version"},
		{"no release", func(t *testing.T, _ *shop, _ string, p *publication) { p.dir = t.TempDir() }, "SHA256SUMS: no such file"},
		{"a file that changed", func(t *testing.T, _ *shop, dir string, _ *publication) {
			file := filepath.Join(dir, archiveFile(products[1], publishedVersion))
			data := []byte(readAll(t, file))
			data[len(data)/2] ^= 1
			if err := os.WriteFile(file, data, 0o644); err != nil {
				t.Fatal(err)
			}
		}, "gpu-placer-v0.1.0-rc.1.oci.tar has the sum "},
		{"a file that is gone", func(t *testing.T, _ *shop, dir string, _ *publication) {
			if err := os.Remove(filepath.Join(dir, chartFile(publishedVersion))); err != nil {
				t.Fatal(err)
			}
		}, "gpu-agent-0.1.0-rc.1.tgz: no such file"},
		{"another registry's", func(_ *testing.T, s *shop, _ string, p *publication) {
			p.repositories["gpu-placer"] = s.at("mirror/gpu-placer")
		}, "names the image "},
		{"a chart's name that Helm does not find", func(_ *testing.T, s *shop, _ string, p *publication) { p.chart = s.at("charts") }, "does not end in /gpu-agent"},
		{"credentials in the name", func(_ *testing.T, s *shop, _ string, p *publication) {
			p.chart = "robot:correct-horse@" + s.at("charts/gpu-agent")
		}, "`docker login` writes them"},
		{"a tag in the name", func(_ *testing.T, s *shop, _ string, p *publication) {
			p.chart = s.at("charts:v1/gpu-agent")
		}, "is not of the form HOST/PATH"},
		{"credentials that cannot be read", func(t *testing.T, _ *shop, _ string, _ *publication) {
			if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "config.json"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := openShop(t)
			dir := s.small(t, "")
			_, err := s.publish(t.Context(), dir, func(p *publication) { test.change(t, s, dir, p) })
			if err == nil || !strings.Contains(err.Error(), test.says) || strings.Contains(err.Error(), "correct-horse") {
				t.Errorf("got %v, want %q, and no password", err, test.says)
			}
			if len(s.writes) > 0 {
				t.Errorf("the registry got %q", s.writes)
			}
		})
	}
}

// Only a registry on this machine is spoken to without TLS.
func TestOnLoopback(t *testing.T) {
	for registry, want := range map[string]bool{
		"localhost": true, "localhost:5000": true, "127.0.0.1:5000": true, "127.1.2.3": true, "[::1]:5000": true, "[::1]": true,
		"registry.example.com": false, "registry.example.com:5000": false, "10.0.0.1:5000": false, "localhost.example.com": false, "docker.io": false,
	} {
		if got := onLoopback(registry); got != want {
			t.Errorf("%s: got %v", registry, got)
		}
	}
}
