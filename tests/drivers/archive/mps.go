// SPDX-License-Identifier: Apache-2.0

package archive

const mpsPool = "pool/non-free/n/nvidia-graphics-drivers/nvidia-cuda-mps_"

// MPS are NVIDIA's programs of MPS, by the driver's version.
var MPS = map[string]Package{
	"535.261.03": {Pool: mpsPool + "535.261.03-1_amd64.deb", Sum: "1341544805aa9c839af45bac5a4bd697cb3eb43105eec439bfba60a8e13ba35a"},
	"550.163.01": {Pool: mpsPool + "550.163.01-2_amd64.deb", Sum: "7da3f29e5ad3390d9fddab7042fa6e9a76df85a69d69efc40401df2f83874764"},
	"555.58.02":  {Pool: mpsPool + "555.58.02-4_amd64.deb", Sum: "7f68f5de74d4ab4fa3182e23bcb7eaa8fd86e54cb8f406f4bebdee963cd4b725"},
}
