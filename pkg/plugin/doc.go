// SPDX-License-Identifier: Apache-2.0

// Package plugin is the door to the kubelet: its device-plugin API, v1beta1.
package plugin
