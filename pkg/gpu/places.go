// SPDX-License-Identifier: Apache-2.0

package gpu

import "path"

// programDirs are the directories below a driver's root where distributions put its programs.
var programDirs = []string{"usr/bin", "bin", "usr/sbin", "sbin", "usr/local/bin", "usr/local/nvidia/bin"}

// libraryDirs are the directories below a driver's root where distributions put its libraries.
var libraryDirs = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib64", "lib/x86_64-linux-gnu",
	"lib/aarch64-linux-gnu", "usr/lib", "lib", "usr/lib64/nvidia", "usr/lib/x86_64-linux-gnu/nvidia/current",
	"usr/lib/aarch64-linux-gnu/nvidia/current", "usr/local/nvidia/lib64",
}

// DriverPlaces returns the directories in which the programs and the libraries of a driver can be that is
// installed below root. The first comes first. None of them need exist.
func DriverPlaces(root string) (programs, libraries []string) {
	for _, dir := range programDirs {
		programs = append(programs, path.Join(root, dir))
	}
	for _, dir := range libraryDirs {
		libraries = append(libraries, path.Join(root, dir))
	}
	return programs, libraries
}
