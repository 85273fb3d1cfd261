// SPDX-License-Identifier: Apache-2.0

package drivers

import "example.com/gpu-agent/tests/drivers/archive"

// deb is a package of Debian's archive.
type deb = archive.Package

const (
	driversPool = "pool/non-free/n/nvidia-graphics-drivers/"
	toolkitPool = "pool/non-free/n/nvidia-cuda-toolkit/"
)

// driver is a real driver: the libraries that a container gets of it.
type driver struct {
	version    string
	cuda, nvml deb
}

// judges are the drivers that Debian's releases have, oldest first.
var judges = []driver{
	{"470.256.02",
		deb{Pool: driversPool + "libcuda1_470.256.02-2_amd64.deb", Sum: "4a6d2dcd33042c215bd1ae4754504e487c39f56e8b7395f9c879b3e127e23de7"},
		deb{Pool: driversPool + "libnvidia-ml1_470.256.02-2_amd64.deb", Sum: "535cef1384d34cdb32360c07275d55740905de78ebe8d3b2ef01caae2a37d3f4"}},
	{"525.147.05",
		deb{Pool: "pool/non-free/n/nvidia-graphics-drivers-tesla/libnvidia-tesla-cuda1_525.147.05-15~deb12u1_amd64.deb", Sum: "93dd22409393521d911cfebeedf59201244d1196464f36a2631dceb3f99f2097"},
		deb{Pool: "pool/non-free/n/nvidia-graphics-drivers-tesla/libnvidia-tesla-ml1_525.147.05-15~deb12u1_amd64.deb", Sum: "187321f507c01d4fa63bf7a66f6ba93b688772c087b64e063654ff144b114da9"}},
	{"535.261.03",
		deb{Pool: driversPool + "libcuda1_535.261.03-1_amd64.deb", Sum: "de1e9ca34164a5983b3f752e6699cf1ad924790f1a843b7d582bab6f99206e1e"},
		deb{Pool: driversPool + "libnvidia-ml1_535.261.03-1_amd64.deb", Sum: "c729da6ab729309dc3f481fe4d38f04ea03b0793154b0962b60117d2f37d082e"}},
	{"550.163.01",
		deb{Pool: driversPool + "libcuda1_550.163.01-2_amd64.deb", Sum: "8feff97aac61d6f27ded96a3c25b9e68025a680476e6072ff7eaf10623509135"},
		deb{Pool: driversPool + "libnvidia-ml1_550.163.01-2_amd64.deb", Sum: "01c1b67d511d7f52c6aa60e14ed56a8eb725d5dc85784a08214d6cb0f4fd1f89"}},
	{"555.58.02",
		deb{Pool: driversPool + "libcuda1_555.58.02-4_amd64.deb", Sum: "3f2c5cb91c88b5f6ce05c81de553ce3ff72e0772dcd07c7e0a85b8cd408b4457"},
		deb{Pool: driversPool + "libnvidia-ml1_555.58.02-4_amd64.deb", Sum: "b731d4ae7f68bd940e6f4c7f072a17b58f38685f875087e61f29c1f23dc7972b"}},
}

// cudaRuntime is a CUDA runtime library, by the version of CUDA.
type cudaRuntime struct {
	version string
	deb     deb
}

var runtimes = []cudaRuntime{
	{"11.8", deb{Pool: toolkitPool + "libcudart11.0_11.8.89~11.8.0-5~deb12u1_amd64.deb", Sum: "6c0e4052f5cb7ffcd70989110ed51af7c506ff7dc60d49900ae316ac9abaee29"}},
	{"12.4", deb{Pool: toolkitPool + "libcudart12_12.4.127~12.4.1-2_amd64.deb", Sum: "361b3721cf84bf068e111ff013c819de61cb475268b0d38db99839471f1b4130"}},
	{"12.5", deb{Pool: toolkitPool + "libcudart12_12.5.39~12.5.0-2+b1_amd64.deb", Sum: "ff7331ef27a41454f6bf8576559c7b5b2038654dc7f15e2da7d4578a5db82a85"}},
}
