// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The tree of nodes of a snapshot document, each with a state that is a JSON text in a string.
//!
//! Owns nodes and their paths. What a state holds is known to the modules of the parts. A reader takes what it knows
//! from a node; what is left is refused by its path.

use json_bound::Budget;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::DocumentError;
use crate::lists::Named;
use crate::text::{parse, print};

/// Maximum number of children of a node: two for each device that the buses have room for.
const CHILDREN_MAX: usize = 8192;

/// Name of the root in paths.
pub(crate) const ROOT: &str = "(root)";

/// A node as it is written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Node {
    snapshots: Named<Node, CHILDREN_MAX>,
    #[serde(default)]
    snapshot_data: Option<NodeData>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeData {
    state: String,
}

impl Node {
    /// A node with a state.
    pub(crate) fn of<T: Serialize>(path: &str, state: &T) -> Result<Self, DocumentError> {
        let state = print(path, state)?;
        Ok(Self { snapshots: Named::default(), snapshot_data: Some(NodeData { state }) })
    }

    /// Adds a child.
    pub(crate) fn add(&mut self, id: &str, child: Node) {
        self.snapshots.0.insert(id.to_owned(), child);
    }
}

/// A node that is read, with its path.
#[derive(Debug)]
pub(crate) struct NodeReader {
    path: String,
    node: Node,
}

impl NodeReader {
    /// The root of a document.
    pub(crate) fn root(node: Node) -> Self {
        Self { path: ROOT.to_owned(), node }
    }

    /// Path of the node.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    fn path_of(&self, id: &str) -> String {
        if self.path == ROOT { id.to_owned() } else { format!("{}/{id}", self.path) }
    }

    /// Takes a child out, if it is there.
    pub(crate) fn take(&mut self, id: &str) -> Option<NodeReader> {
        let node = self.node.snapshots.0.remove(id)?;
        Some(Self { path: self.path_of(id), node })
    }

    /// Takes a child out.
    pub(crate) fn require(&mut self, id: &str) -> Result<NodeReader, DocumentError> {
        self.take(id).ok_or_else(|| DocumentError::MissingNode { path: self.path_of(id) })
    }

    /// Whether a child is there.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.node.snapshots.0.contains_key(id)
    }

    /// Ids of the children.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.node.snapshots.0.keys().cloned().collect()
    }

    /// The text of the state.
    pub(crate) fn text(&self) -> Result<&str, DocumentError> {
        let no_state = || DocumentError::NoState { path: self.path.clone() };
        Ok(&self.node.snapshot_data.as_ref().ok_or_else(no_state)?.state)
    }

    /// The state.
    pub(crate) fn state<T: DeserializeOwned>(
        &self,
        budget: &mut Budget,
    ) -> Result<T, DocumentError> {
        parse(&self.path, self.text()?, budget)
    }

    /// Refuses a state.
    pub(crate) fn has_no_state(&self) -> Result<(), DocumentError> {
        match self.node.snapshot_data {
            Some(_) => Err(DocumentError::UnknownState { path: self.path.clone() }),
            None => Ok(()),
        }
    }

    /// Refuses the children that were not taken.
    pub(crate) fn end(self) -> Result<(), DocumentError> {
        match self.node.snapshots.0.keys().next() {
            Some(id) => Err(DocumentError::UnknownNode { path: self.path_of(id) }),
            None => Ok(()),
        }
    }

    /// An error about a value of this node.
    pub(crate) fn out_of_bounds(&self, problem: String) -> DocumentError {
        DocumentError::OutOfBounds { path: self.path.clone(), problem }
    }
}
