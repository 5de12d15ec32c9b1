// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

// Rewrites the description of the API from OpenAPI 3.1 to 3.0, which is what older generators of clients read:
// describe FROM TO. In 3.1 `null` is a type among others, in 3.0 a mark beside the type.
package main

import (
	"encoding/json"
	"fmt"
	"os"
)

func main() {
	if len(os.Args) != 3 {
		fail(fmt.Errorf("two arguments are wanted: FROM TO"))
	}
	text, err := os.ReadFile(os.Args[1])
	if err != nil {
		fail(err)
	}
	var document map[string]interface{}
	if err := json.Unmarshal(text, &document); err != nil {
		fail(err)
	}
	rewrite(document)
	document["openapi"] = "3.0.3"
	if text, err = json.MarshalIndent(document, "", "  "); err != nil {
		fail(err)
	}
	if err := os.WriteFile(os.Args[2], text, 0o644); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "describe:", err)
	os.Exit(1)
}

// rewrite changes a schema and all that is in it.
func rewrite(value interface{}) {
	switch value := value.(type) {
	case map[string]interface{}:
		if types, ok := value["type"].([]interface{}); ok {
			value["type"] = withoutNull(types, func(it interface{}) bool { return it == "null" })
			value["nullable"] = true
		}
		if choices, ok := value["oneOf"].([]interface{}); ok {
			// A reference stands alone in 3.0, so that it has no mark; in Go every reference can be nil.
			delete(value, "oneOf")
			value["$ref"] = reference(withoutNull(choices, isNullSchema))
		}
		for _, member := range value {
			rewrite(member)
		}
	case []interface{}:
		for _, item := range value {
			rewrite(item)
		}
	}
}

// withoutNull is the one choice that is left without `null`.
func withoutNull(choices []interface{}, isNull func(interface{}) bool) interface{} {
	var others []interface{}
	for _, choice := range choices {
		if !isNull(choice) {
			others = append(others, choice)
		}
	}
	if len(others) != 1 || len(choices) != 2 {
		fail(fmt.Errorf("3.0 has no counterpart to %v", choices))
	}
	return others[0]
}

func isNullSchema(schema interface{}) bool {
	object, ok := schema.(map[string]interface{})
	return ok && object["type"] == "null"
}

func reference(schema interface{}) interface{} {
	object, ok := schema.(map[string]interface{})
	if !ok || object["$ref"] == nil {
		fail(fmt.Errorf("3.0 has no counterpart to a choice of null and %v", schema))
	}
	return object["$ref"]
}
