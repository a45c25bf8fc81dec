// Package archtest has the tests by which the repository checks its own
// structure. It holds no code.
package archtest
