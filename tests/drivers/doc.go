// SPDX-License-Identifier: Apache-2.0

// Package drivers holds the cap's libraries against NVIDIA's own. The emulated
// driver of the other tests was written after documentation; here the libraries of
// real drivers say how functions are called, which of them there are, and which one
// cuGetProcAddress gives for a name, a version and a flag. None of that needs a GPU.
//
// # The judges
//
// Debian's non-free archive has libcuda and libnvidia-ml of several drivers, and
// CUDA runtimes. They are downloaded by the machine's own apt, from where it has its
// packages, each pinned by its SHA-256, and unpacked below the cache; the repository
// has nothing of them, and the machine's lists and packages stay as they are. Where
// a package is not to be had, offline or because the archive has a later one, its
// tests are skipped and say so. A judge runs without any right of root's: NVIDIA's
// libraries would make the device nodes that they miss.
//
//   - TestNames: dlsym finds each function of a driver behind the cap, ours in front
//     of the driver's, and none that the driver lacks. TestLinked: so does the loader
//     for a program that is linked against the library.
//   - TestAddresses: cuGetProcAddress, in both its forms, answers as the bare driver
//     does: the same error and status, and the same function, or our override of
//     exactly that one.
//   - TestRuntime: a CUDA runtime asks for the same functions, gets the same, and
//     tells a program the same.
//   - TestMPS: NVIDIA's own control daemon and libcuda, with the cap in front of the
//     latter: which daemon a program reaches whatever its environment says, and when it
//     is refused. A server needs a card.
//
// # The tables
//
// names.txt says which names drivers export and as of which version of CUDA they are
// given; TestTable holds it against the judges. For CUDA 12.8 and 13, of which there
// is no package, it is from public bindings, which its head names: TestModels makes
// libraries of it that answer as such drivers do, and judges as above.
//
// classes.txt says of each function that the cap does not stand in front of why it
// need not be counted. A new name that is in neither fails TestClasses: somebody has
// to ask whether it takes GPU memory.
//
// # A new driver
//
// Add its packages to packages.go, run the tests, and add to names.txt what
// TestTable asks for and to classes.txt, or to the cap, what TestClasses asks for.
package drivers
