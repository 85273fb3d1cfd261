// SPDX-License-Identifier: Apache-2.0

// Package stories runs the stories of docs/story-*.md on a real node: a kubelet, containerd, an API server with its
// controllers, the agent, and for one story Kueue, the placer and a second node. Only the NVIDIA driver is emulated.
//
// Each test applies the very files of its story, below deployments/examples/stories, and looks at what the page says
// happens. It changes three things in them: images and commands, since no such program is here, and with them their
// probes; CPU and memory, since this machine has less; and how long a pod is idle before it lends its room. The
// commands that a page shows are run as the page has them.
//
// A shell that waits takes the programs' place, and the probe of tests/memcap takes GPU memory in the containers.
package stories
