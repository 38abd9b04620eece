// AXI4-Lite control: 0x0 start (write 1), 0x4 status (bit 0 done, bit 1 running), 0x8 the word of the
// program to write next, 0xc a quarter of it, the lowest first; after four the next word follows.

module npu_control #(
    parameter int BITS = 7
) (
    input  logic            clk,
    input  logic            rst,
    input  logic            awvalid,
    output logic            awready,
    input  logic [3:0]      awaddr,
    input  logic            wvalid,
    output logic            wready,
    input  logic [31:0]     wdata,
    output logic            bvalid,
    input  logic            bready,
    input  logic            arvalid,
    output logic            arready,
    input  logic [3:0]      araddr,
    output logic            rvalid,
    input  logic            rready,
    output logic [31:0]     rdata,
    output logic            start,
    output logic            write,
    output logic [BITS-1:0] write_row,
    output logic [1:0]      write_part,
    output logic [31:0]     write_data,
    input  logic            running,
    input  logic            finished
);
  logic taken, asked;
  assign taken = awvalid && wvalid && !bvalid;
  assign awready = taken;
  assign wready = taken;
  assign asked = arvalid && !rvalid;
  assign arready = asked;
  assign start = taken && awaddr == 4'h0 && wdata[0] && !(running && !finished);
  assign write = taken && awaddr == 4'hc;
  assign write_data = wdata;
  always_ff @(posedge clk) begin
    if (rst) begin
      bvalid <= 1'b0;
      rvalid <= 1'b0;
      write_row <= {BITS{1'b0}};
      write_part <= 2'd0;
    end else begin
      if (taken) bvalid <= 1'b1;
      else if (bready) bvalid <= 1'b0;
      if (asked) begin
        rvalid <= 1'b1;
        rdata <= araddr == 4'h4 ? {30'd0, running && !finished, finished} : 32'd0;
      end else if (rready) rvalid <= 1'b0;
      if (taken && awaddr == 4'h8) begin
        write_row <= wdata[BITS-1:0];
        write_part <= 2'd0;
      end else if (write) begin
        write_part <= write_part + 2'd1;
        if (write_part == 2'd3) write_row <= write_row + {{(BITS - 1) {1'b0}}, 1'b1};
      end
    end
  end
`ifdef FORMAL
  logic started;
  initial started = 1'b0;
  always_ff @(posedge clk) started <= 1'b1;
  always @* assume (started || rst);
  npu_axi_held #(.WIDTH(1)) held_answer (
      .clk(clk), .rst(rst), .valid(bvalid), .ready(bready), .shown(1'b0));
  npu_axi_held #(.WIDTH(32)) held_data (
      .clk(clk), .rst(rst), .valid(rvalid), .ready(rready), .shown(rdata));
`endif
endmodule
