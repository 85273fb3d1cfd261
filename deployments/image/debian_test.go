// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// withApt puts a script in the place of apt-get.
func withApt(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "apt-get"), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

const zeros = "0000000000000000000000000000000000000000000000000000000000000000"

func TestLockIsStrict(t *testing.T) {
	for _, test := range []struct{ line, want string }{
		{"image libc6 amd64", "3 columns"},
		{"other libc6 1 amd64 libc6_1_amd64.deb " + zeros, `use "other"`},
		{"image libc6 1 amd64 libc6_1_amd64.deb abc", "no SHA-256"},
		{"image libc6 1 amd64 ../libc6_1_amd64.deb " + zeros, "no name of a package's file"},
	} {
		if _, err := parseLock("# comment\n\n" + test.line); err == nil || !strings.Contains(err.Error(), "line 3") || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want line 3 and %q", test.line, err, test.want)
		}
	}
	all, err := parseLock(lockText)
	if err != nil {
		t.Fatal(err)
	}
	for _, arch := range architectures {
		if len(of(all, arch, useImage)) == 0 || len(of(all, arch, useLink)) == 0 || len(of(all, arch, usePlacer)) < 2 {
			t.Errorf("debian.lock has nothing for %s", arch)
		}
	}
}

func TestPackageIsHeldAgainstTheLock(t *testing.T) {
	// Serves a file with another content.
	withApt(t, `for a; do case $a in download) echo forged >libc6_1_amd64.deb;; esac; done`)
	d := &debian{dir: t.TempDir()}
	p := pkg{name: "libc6", version: "1", arch: "amd64", file: "libc6_1_amd64.deb", sha256: zeros}
	if _, err := d.fetch(t.Context(), p); err == nil || !strings.Contains(err.Error(), "not the package that was locked") {
		t.Errorf("fetching a forged package gives %v", err)
	}
	if _, err := os.Stat(filepath.Join(d.dir, p.file)); err == nil {
		t.Error("the forged package was kept")
	}
	if err := os.WriteFile(filepath.Join(d.dir, p.file), []byte("forged"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := d.fetch(t.Context(), p); err == nil || !strings.Contains(err.Error(), "not the package that was locked") {
		t.Errorf("a forged package in the cache gives %v", err)
	}
}

func TestPackageNoLongerServed(t *testing.T) {
	withApt(t, `for a; do case $a in download) echo "E: Version '1' for 'libc6' was not found" >&2; exit 100;; esac; done`)
	d := &debian{dir: t.TempDir()}
	_, err := d.fetch(t.Context(), pkg{name: "libc6", version: "1", arch: "amd64", file: "libc6_1_amd64.deb", sha256: zeros})
	if err == nil || !strings.Contains(err.Error(), "was not found") || !strings.Contains(err.Error(), "`make lock` renews debian.lock") {
		t.Errorf("got %v, want apt's reason and what to do", err)
	}
}

// What the mirror has dropped is replaced for an image that is no release's, and said; what
// it cannot give out at all is an error.
func TestNewerWhereTheLockedIsGone(t *testing.T) {
	ones := strings.ReplaceAll(zeros, "0", "1")
	withApt(t, `for a; do case $a in
	--print-uris) echo "'http://mirror/a' libc6_2_amd64.deb 7 SHA256:`+ones+`"; exit;;
	download) down=yes;; esac; done
	[ -z "$down" ] || { echo "E: Version '1' for 'libc6' was not found" >&2; exit 100; }`)
	d := &debian{dir: t.TempDir()}
	old := pkg{use: useImage, name: "libc6", version: "1", arch: "amd64", file: "libc6_1_amd64.deb", sha256: zeros}
	other := pkg{use: useImage, name: "libc6", version: "1", arch: "arm64", file: "libc6_1_arm64.deb", sha256: zeros}
	now, replaced, err := d.served(t.Context(), []pkg{other, old}, "amd64")
	if err != nil {
		t.Fatal(err)
	}
	want := pkg{use: useImage, name: "libc6", version: "2", arch: "amd64", file: "libc6_2_amd64.deb", sha256: ones}
	if len(now) != 2 || now[0] != other || now[1] != want {
		t.Errorf("got %v, want %v in place of %v alone", now, want, old)
	}
	if len(replaced) != 1 || !strings.Contains(replaced[0], "libc6 1 amd64 is no longer served: the image is made with 2") {
		t.Errorf("it says %q", replaced)
	}
	if _, _, err := d.served(t.Context(), []pkg{want}, "amd64"); err == nil || !strings.Contains(err.Error(), "was not found") {
		t.Errorf("of a version that the mirror lists and does not give out: %v", err)
	}
}

func TestLockIsRenewed(t *testing.T) {
	ones := strings.ReplaceAll(zeros, "0", "1")
	withApt(t, `for a; do case $a in --print-uris)
	echo "'http://mirror/a' base-files_1%3a3_amd64.deb 7 SHA256:`+ones+`"
	echo "'http://mirror/b' libc6_2_arm64.deb 7 SHA256:`+zeros+`";; esac; done`)
	d := &debian{dir: t.TempDir()}
	old := "# why\nimage libc6 2 arm64 libc6_2_arm64.deb " + zeros + "\nimage base-files amd64\n"
	got, err := renewLock(t.Context(), d, old)
	want := "# why\nimage libc6 2 arm64 libc6_2_arm64.deb " + zeros + "\nimage base-files 1:3 amd64 base-files_1%3a3_amd64.deb " + ones + "\n"
	if err != nil || got != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, got, want)
	}
	lock, err := parseLock(strings.ReplaceAll(want, "1%3a3", "1%3a2"))
	if err != nil {
		t.Fatal(err)
	}
	if late, err := behind(t.Context(), d, lock); err != nil || len(late) != 0 {
		t.Errorf("a lock of the mirror's packages is behind: %v, %v", late, err)
	}
	lock[0].sha256 = ones
	if late, err := behind(t.Context(), d, lock); err != nil || len(late) != 1 || late[0] != "libc6 2 arm64: the mirror has 2" {
		t.Errorf("got %q, %v; want libc6 alone", late, err)
	}
	if _, err := renewLock(t.Context(), d, "image absent amd64\n"); err == nil || !strings.Contains(err.Error(), "the mirror has no absent for amd64") {
		t.Errorf("got %v, want that a package is missing", err)
	}
}
