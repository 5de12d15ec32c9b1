// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The language of man pages, as far as this program writes it: the macros of man(7), and characters that need an escape.
//!
//! Owns escapes. Text comes in plain, or with the marks of Markdown for code and links, and must never become a request or an
//! escape of the language.

/// Plain text, with an escape for what roff would take for something else, or print as another character.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\e"),
            // Not a hyphen: options are searched for, and copied.
            '-' => out.push_str("\\-"),
            '\'' => out.push_str("\\(aq"),
            '`' => out.push_str("\\(ga"),
            '^' => out.push_str("\\(ha"),
            '~' => out.push_str("\\(ti"),
            // A full stop is a request where it begins a line.
            '.' if out.is_empty() => out.push_str("\\&."),
            other => out.push(other),
        }
    }
    out
}

/// Bold text.
pub fn bold(text: &str) -> String {
    format!("\\fB{}\\fR", escaped(text))
}

/// Text that stands for another one.
pub fn italic(text: &str) -> String {
    format!("\\fI{}\\fR", escaped(text))
}

/// Text with code between backticks, which becomes bold, and links, of which the text stays.
pub fn marked(text: &str) -> String {
    let mut out = String::new();
    for (at, part) in text.split('`').enumerate() {
        if at % 2 == 1 {
            out.push_str(&bold(part));
        } else {
            // At the beginning of a line alone a full stop needs an escape.
            let plain = without_links(part);
            let text = escaped(&plain);
            let text = if out.is_empty() { &text } else { text.trim_start_matches("\\&") };
            out.push_str(text);
        }
    }
    out
}

/// `[text](address)` becomes the text.
fn without_links(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, link)) = rest.split_once('[') {
        let parts = link
            .split_once("](")
            .and_then(|(name, more)| more.split_once(')').map(|(_, after)| (name, after)));
        out.push_str(before);
        if let Some((name, after)) = parts {
            out.push_str(name);
            rest = after;
        } else {
            out.push('[');
            rest = link;
        }
    }
    out.push_str(rest);
    out
}

/// A man page that is being written. What its functions take is escaped, or comes from the functions above.
pub struct Page(String);

impl Page {
    /// A page of section 1.
    pub fn new(name: &str, version: &str) -> Self {
        let name = escaped(&name.to_uppercase());
        // No date: it would be that of the build.
        let head = format!(".TH \"{name}\" 1 \"\" \"{}\" \"User Commands\"\n", escaped(version));
        // Left-adjusted and without hyphens: words of options must stay whole.
        Self(head + ".ad l\n.nh\n")
    }

    fn line(&mut self, text: &str) {
        self.0.push_str(text);
        self.0.push('\n');
    }

    /// A section.
    pub fn section(&mut self, name: &str) {
        self.line(&format!(".SH {name}"));
    }

    /// A line of its own.
    pub fn text(&mut self, text: &str) {
        self.line(text);
    }

    /// The beginning of a paragraph; a section begins one by itself.
    fn begin(&mut self) {
        if !self.0.lines().next_back().is_some_and(|line| line.starts_with(".SH")) {
            self.line(".PP");
        }
    }

    /// A paragraph.
    pub fn paragraph(&mut self, text: &str) {
        self.begin();
        self.line(text);
    }

    /// A term, and what is said of it.
    pub fn entry(&mut self, term: &str, text: &str) {
        self.line(".TP");
        self.line(term);
        self.line(text);
    }

    /// Entries from here on belong to the one before.
    pub fn indent(&mut self) {
        self.line(".RS");
    }

    /// The end of that.
    pub fn outdent(&mut self) {
        self.line(".RE");
    }

    /// Lines as they are typed.
    pub fn code(&mut self, text: &str) {
        self.begin();
        self.line(".RS 4");
        self.line(".EX");
        for line in text.lines() {
            self.line(&escaped(line));
        }
        self.line(".EE");
        self.line(".RE");
    }

    /// The whole page.
    pub fn finish(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_of_roff_are_escaped() {
        assert_eq!(escaped("a\\b --x '~^`"), "a\\eb \\-\\-x \\(aq\\(ti\\(ha\\(ga");
        assert_eq!(escaped(".TH"), "\\&.TH");
        assert_eq!(escaped("a.b"), "a.b");
    }

    #[test]
    fn marks_become_fonts_and_links_their_text() {
        assert_eq!(marked("a `--b` c."), "a \\fB\\-\\-b\\fR c.");
        assert_eq!(marked("`a`. b"), "\\fBa\\fR. b");
        assert_eq!(marked("its [sandbox](sandbox.md) ends"), "its sandbox ends");
        assert_eq!(marked("[4K,2M] and fd=[3"), "[4K,2M] and fd=[3");
    }

    #[test]
    fn a_page_has_its_parts() {
        let mut page = Page::new("a-b", "v 1");
        page.section("NAME");
        page.paragraph("text");
        page.entry("term", "what it is");
        page.code("$ ls\n.x");
        let text = page.finish();
        assert!(text.starts_with(".TH \"A\\-B\" 1 \"\" \"v 1\" \"User Commands\"\n"), "{text}");
        let rest =
            ".SH NAME\ntext\n.TP\nterm\nwhat it is\n.PP\n.RS 4\n.EX\n$ ls\n\\&.x\n.EE\n.RE\n";
        assert!(text.ends_with(rest), "{text}");
    }
}
